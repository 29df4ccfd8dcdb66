// The timeline of a step: a lane for each worker, a bar for each span.

import { bytes, duration, make, makeSvg, shortName } from "./format.js";

const KINDS = ["call", "serialize", "wire", "queue", "deserialize", "run", "backward", "join", "gradients", "local_engine", "wait", "commit", "optimizer_step", "rref", "checkpoint", "connection"];
const ROW_PX = 18;
const BAR_PX = 15;
const AXIS_PX = 24;
const LANE_GAP_PX = 10;
const MOST_FLOWS = 200;

const kindClass = (kind) => `k-${KINDS.includes(kind) ? kind : "other"}`;

export class Timeline {
  constructor(area, detail, legend) {
    this.area = area;
    this.detail = detail;
    this.legend = legend;
    this.spans = [];
    this.chosen = -1;
    this.scale = 1;
    area.addEventListener("keydown", (event) => this.onKey(event));
    area.addEventListener("click", (event) => this.choose(indexOf(event.target)));
    area.addEventListener("mouseover", (event) => this.preview(indexOf(event.target)));
    area.addEventListener("mouseleave", () => this.preview(this.chosen));
    new ResizeObserver(() => this.draw()).observe(area);
  }

  show(spans, workers) {
    const text = JSON.stringify([spans, workers]);
    if (text === this.shown) return;
    this.shown = text;
    this.spans = spans;
    this.workers = workers;
    this.chosen = -1;
    this.detail.textContent = "";
    this.draw();
    const kinds = [...new Set(spans.map((span) => span.kind))].sort((a, b) => KINDS.indexOf(a) - KINDS.indexOf(b));
    this.legend.replaceChildren(
      ...kinds.map((kind) => make("li", {}, makeSvg("svg", { class: "swatch", "aria-hidden": "true" }, makeSvg("rect", { width: "100%", height: "100%", class: kindClass(kind) })), kind.replace("_", " "))),
    );
  }

  zoom(factor) {
    this.scale = factor === 0 ? 1 : Math.min(64, Math.max(1, this.scale * factor));
    this.draw();
  }

  draw() {
    if (!this.spans.length || !this.area.clientWidth) return;
    const names = this.workers.filter((name) => this.spans.some((span) => span.worker === name));
    const labelPx = Math.min(150, 24 + 7.2 * Math.max(...names.map((name) => name.length)));
    const width = Math.max(200, (this.area.clientWidth - labelPx - 16) * this.scale);
    const endMs = Math.max(...this.spans.map((span) => span.end_ms), 0.001);
    const x = (ms) => labelPx + (ms / endMs) * width;
    const lanes = [];
    let top = AXIS_PX + 4;
    this.bars = [];
    for (const name of names) {
      const { rows, count } = pack(this.spans, name);
      lanes.push({ name, top, height: count * ROW_PX });
      for (const [index, row] of rows) this.bars[index] = { y: top + row * ROW_PX };
      top += count * ROW_PX + LANE_GAP_PX;
    }
    const svg = makeSvg("svg", { width: labelPx + width + 16, height: top + 2, "aria-hidden": "true" });
    for (const ms of ticks(endMs, width)) {
      svg.append(makeSvg("line", { class: "grid", x1: x(ms), x2: x(ms), y1: AXIS_PX - 4, y2: top }));
      svg.append(makeSvg("text", { class: "tick", x: x(ms) + 3, y: AXIS_PX - 9 }, duration(ms / 1e3)));
    }
    for (const lane of lanes) {
      const y = lane.top - LANE_GAP_PX / 2;
      svg.append(makeSvg("line", { class: "lane", x1: 0, x2: labelPx + width + 16, y1: y, y2: y }));
      svg.append(makeSvg("text", { class: "lane-name", x: 14, y: lane.top + 12 }, lane.name));
    }
    this.spans.forEach((span, index) => {
      if (!this.bars[index]) return;
      const left = x(span.start_ms);
      const wide = Math.max(2, x(span.end_ms) - left);
      const classes = `span ${kindClass(span.kind)} ${span.outcome === "ok" ? "" : "failed"}`;
      const bar = makeSvg("rect", { class: classes, x: left, y: this.bars[index].y, width: wide, height: BAR_PX, rx: Math.min(3, wide / 3), "data-index": index });
      bar.append(makeSvg("title", {}, describe(span)));
      svg.append(bar);
      this.bars[index] = { ...this.bars[index], bar, left, wide };
      const label = span.name ? shortName(span.name) : span.kind.replace("_", " ");
      if (wide > label.length * 6.4 + 8) svg.append(makeSvg("text", { class: "span-name", x: left + 5, y: this.bars[index].y + 11 }, label));
    });
    this.drawFlows(svg);
    this.area.replaceChildren(svg);
    if (this.chosen >= 0) this.choose(this.chosen);
  }

  // Arrows from where a message left to where it arrived.
  drawFlows(svg) {
    const left = new Map();
    this.spans.forEach((span, index) => span.flow_out.forEach((flow) => left.set(flow, index)));
    this.flows = [];
    this.spans.forEach((span, to) => {
      for (const flow of span.flow_in) {
        const from = left.get(flow);
        if (from === undefined || !this.bars[from]?.bar || !this.bars[to]?.bar || this.flows.length >= MOST_FLOWS) continue;
        const [x1, y1] = [this.bars[from].left + this.bars[from].wide, this.bars[from].y + BAR_PX / 2];
        const [x2, y2] = [this.bars[to].left, this.bars[to].y + BAR_PX / 2];
        const bend = Math.max(10, Math.abs(x2 - x1) / 2);
        const path = makeSvg("path", { class: "flow", d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}` });
        svg.append(path, makeSvg("path", { class: "flow-head", d: `M${x2} ${y2}l-5 -3v6z` }));
        this.flows.push({ from, to, path });
      }
    });
  }

  choose(index) {
    for (const flow of this.flows ?? []) flow.path.classList.toggle("chosen", index >= 0 && (flow.from === index || flow.to === index));
    this.bars?.[this.chosen]?.bar?.classList.remove("chosen");
    this.chosen = index;
    const found = this.bars?.[index];
    if (found) {
      found.bar.classList.add("chosen");
      const { scrollLeft, clientWidth } = this.area;
      if (found.left < scrollLeft + 150 || found.left > scrollLeft + clientWidth - 40) this.area.scrollLeft = found.left - clientWidth / 3;
    }
    this.preview(index);
  }

  preview(index) {
    this.detail.textContent = index >= 0 && this.spans[index] ? describe(this.spans[index]) : "";
  }

  onKey(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (steps[event.key]) this.choose(Math.min(this.spans.length - 1, Math.max(0, this.chosen + steps[event.key])));
    else if (event.key === "Home") this.choose(0);
    else if (event.key === "End") this.choose(this.spans.length - 1);
    else if (event.key === "Escape") this.choose(-1);
    else if (event.key === "+" || event.key === "=") this.zoom(1.6);
    else if (event.key === "-") this.zoom(1 / 1.6);
    else if (event.key === "0") this.zoom(0);
    else return;
    event.preventDefault();
  }
}

function indexOf(target) {
  const found = target.closest?.("[data-index]");
  return found ? Number(found.dataset.index) : -1;
}

function describe(span) {
  const parts = [`${span.worker}: ${span.kind.replace("_", " ")}`];
  if (span.name) parts.push(span.name);
  if (span.peer) parts.push(`with ${span.peer}`);
  parts.push(`${duration((span.end_ms - span.start_ms) / 1e3)} from ${duration(span.start_ms / 1e3)}`);
  if (span.num_bytes) parts.push(bytes(span.num_bytes));
  if (span.outcome !== "ok") parts.push(span.outcome);
  return parts.join(" · ");
}

// Put spans that overlap into different rows: what runs inside another comes below it.
function pack(spans, worker) {
  const ends = [];
  const rows = [];
  spans.forEach((span, index) => {
    if (span.worker !== worker) return;
    let row = ends.findIndex((end) => end <= span.start_ms);
    if (row < 0) row = ends.length;
    ends[row] = span.end_ms;
    rows.push([index, row]);
  });
  return { rows, count: Math.max(1, ends.length) };
}

function ticks(endMs, widthPx) {
  const rough = endMs / Math.max(2, widthPx / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  return Array.from({ length: Math.floor(endMs / step) + 1 }, (_, index) => index * step);
}
