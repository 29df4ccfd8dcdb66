// Values for people, and elements without markup: text from workers never becomes HTML.

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count;
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : Number(value.toPrecision(2))} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function rate(perSecond) {
  if (perSecond === null || perSecond === undefined) return "–";
  if (perSecond >= 1000) return `${(perSecond / 1000).toFixed(1)} k`;
  return perSecond >= 10 || perSecond === 0 ? perSecond.toFixed(0) : perSecond.toFixed(1);
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

export function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

// The last part of a function's name: "model:Encoder.forward" is "forward".
export function shortName(name) {
  return name.split(/[:.]/).filter(Boolean).pop() || name;
}

// make("td", {class: "num"}, "text", child, ...)
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function pill(kind, text) {
  return make("span", { class: `pill ${kind}` }, text);
}
