// The distributed graph: workers as boxes, operators in them, messages as arrows.

import cytoscape from "./vendor/cytoscape.esm.min.mjs";
import dagre from "./vendor/cytoscape-dagre.min.mjs";
import { bytes, duration, shortName } from "./format.js";

cytoscape.use(dagre);

const PAN_PX = 60;
const PAD_PX = 24;
const LEAST_PX = 300;
const MOST_PX = 620;
const MOST_ZOOM = 1.15;
const READABLE = 0.62;
const FONT = "ui-sans-serif, system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif";

export function messageLabel(message) {
  const name = shortName(message.function);
  return message.is_result ? `${name} result` : `${name}()`;
}

function nodeLabel(node) {
  if (node.kind === "unknown") return "?";
  if (node.kind === "received") return "received";
  if (node.is_passed_on) return "passed on";
  const shown = node.operators.slice(0, 3).join(", ") + (node.operators.length > 3 ? " …" : "");
  const leaves = node.num_leaves ? `${node.num_leaves} ${node.num_leaves === 1 ? "leaf" : "leaves"}, ${bytes(node.leaf_bytes)}` : "";
  return [shown, leaves].filter(Boolean).join("\n") || (node.kind === "roots" ? "roots" : "sent");
}

function edgeLabel(message) {
  const parts = [messageLabel(message)];
  const numbers = [];
  if (message.num_bytes !== null) numbers.push(bytes(message.num_bytes));
  if (message.time_s !== null && message.time_s !== undefined) numbers.push(duration(message.time_s));
  if (numbers.length) parts.push(numbers.join(" · "));
  return parts.join("\n");
}

export class Graph {
  constructor(container, onSelect) {
    this.container = container;
    this.shape = "";
    this.cy = cytoscape({ container, minZoom: 0.15, maxZoom: 3, boxSelectionEnabled: false, autoungrabify: true });
    this.cy.on("tap", (event) => onSelect(event.target !== this.cy && event.target.isEdge?.() ? event.target.id() : null));
    container.addEventListener("keydown", (event) => this.onKey(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
    new ResizeObserver(() => this.onResize()).observe(container);
    this.paint();
  }

  show(graph, states) {
    const nodes = graph.nodes.map((node) => ({ data: { id: node.id, parent: `w:${node.worker}`, label: nodeLabel(node) }, classes: nodeClasses(node) }));
    const workers = graph.workers
      .filter((worker) => graph.nodes.some((node) => node.worker === worker.name))
      .map((worker) => ({
        data: { id: `w:${worker.name}`, label: worker.answered ? worker.name : `${worker.name} · no answer` },
        classes: `worker ${states.get(worker.name) === "lost" ? "lost" : worker.answered ? "" : "silent"}`,
      }));
    const messages = graph.messages.map((message, index) => ({
      data: { id: `m:${index}`, source: message.source, target: message.target, label: edgeLabel(message) },
      classes: `message ${message.is_result ? "result" : ""} ${message.waits_for ? "waiting" : message.has_arrived ? "" : "sent"}`,
    }));
    const links = graph.links.map(([source, target]) => ({ data: { id: `l:${source}:${target}`, source, target }, classes: "link" }));
    const shape = JSON.stringify([workers.map((item) => item.data.id), nodes.map((item) => item.data.parent), graph.messages.map((item) => [item.source, item.target]), graph.links]);
    this.container.setAttribute("aria-label", `Distributed graph: ${graph.num_messages} ${graph.num_messages === 1 ? "message" : "messages"} between ${graph.workers.map((item) => item.name).join(", ")}`);
    if (shape === this.shape) {
      this.update([...workers, ...nodes], messages);
      return;
    }
    this.shape = shape;
    this.cy.elements().remove();
    this.cy.add([...workers, ...nodes, ...messages, ...links]);
    this.arrange();
  }

  // The same boxes and arrows, with new labels and colours: nothing moves.
  update(nodes, messages) {
    this.cy.batch(() => {
      for (const item of nodes) this.cy.getElementById(item.data.id).data("label", item.data.label).classes(item.classes);
      messages.forEach((item) => this.cy.getElementById(item.data.id).data("label", item.data.label).classes(item.classes));
    });
  }

  // From left to right if that can be read, else from top to bottom, where there is more room.
  arrange() {
    this.width = this.container.clientWidth;
    const zoom = this.layOut("LR");
    if (zoom < READABLE && this.layOut("TB") < zoom) this.layOut("LR");
    this.fit();
  }

  layOut(rankDir) {
    const isWide = rankDir === "LR";
    this.cy.layout({ name: "dagre", rankDir, nodeSep: 24, rankSep: isWide ? 80 : 52, edgeSep: 14, ranker: "tight-tree", animate: false, fit: false }).run();
    const box = this.cy.elements().boundingBox();
    const zoom = Math.min(MOST_ZOOM, (this.width - 2 * PAD_PX) / box.w, (MOST_PX - 2 * PAD_PX) / box.h);
    this.container.style.height = `${Math.max(LEAST_PX, Math.min(MOST_PX, box.h * zoom + 2 * PAD_PX))}px`;
    return zoom;
  }

  fit() {
    this.cy.resize();
    this.cy.fit(undefined, PAD_PX);
    if (this.cy.zoom() > MOST_ZOOM) {
      this.cy.zoom(MOST_ZOOM);
      this.cy.center();
    }
  }

  zoom(factor) {
    this.cy.zoom({ level: this.cy.zoom() * factor, renderedPosition: { x: this.cy.width() / 2, y: this.cy.height() / 2 } });
  }

  select(messageId) {
    this.cy.edges().removeClass("chosen");
    if (messageId) this.cy.getElementById(messageId).addClass("chosen");
  }

  onResize() {
    if (this.cy.elements().length && this.container.clientWidth && this.container.clientWidth !== this.width) this.arrange();
  }

  onKey(event) {
    const moves = { ArrowLeft: [PAN_PX, 0], ArrowRight: [-PAN_PX, 0], ArrowUp: [0, PAN_PX], ArrowDown: [0, -PAN_PX] };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (moves[event.key]) this.cy.panBy({ x: moves[event.key][0], y: moves[event.key][1] });
    else if (event.key === "+" || event.key === "=") this.zoom(1.25);
    else if (event.key === "-") this.zoom(0.8);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
  }

  paint() {
    const css = getComputedStyle(document.documentElement);
    const colour = (name) => css.getPropertyValue(`--${name}`).trim();
    this.cy.style([
      {
        selector: "node",
        style: {
          shape: "round-rectangle", width: (node) => size(node)[0], height: (node) => size(node)[1], padding: "8px", "background-color": colour("card"), "border-width": 1,
          "border-color": colour("line-strong"), label: "data(label)", "text-valign": "center", "text-halign": "center", "text-wrap": "wrap",
          "font-size": 11, "font-family": FONT, color: colour("text"), "line-height": 1.3,
        },
      },
      { selector: "node.roots", style: { "background-color": colour("brand"), "border-color": colour("brand"), color: colour("card"), "font-weight": 600 } },
      { selector: "node.plain", style: { color: colour("muted"), "border-style": "dashed" } },
      {
        selector: "node.worker",
        style: {
          "background-color": colour("ground"), "background-opacity": 0.85, "border-color": colour("line-strong"), "text-valign": "top", "text-halign": "center",
          "font-size": 13, "font-weight": 600, padding: "16px", "text-margin-y": -5, color: colour("text"),
        },
      },
      { selector: "node.worker.silent", style: { "border-style": "dashed", "border-color": colour("warn"), color: colour("warn") } },
      { selector: "node.worker.lost", style: { "border-width": 2, "border-color": colour("bad"), "background-color": colour("bad-soft"), color: colour("bad") } },
      {
        selector: "edge",
        style: {
          width: 1.6, "curve-style": "bezier", "target-arrow-shape": "triangle", "arrow-scale": 0.9, "line-color": colour("kind-call"),
          "target-arrow-color": colour("kind-call"),
        },
      },
      {
        selector: "edge.message",
        style: {
          label: "data(label)", "text-wrap": "wrap", "font-size": 9.5, "font-family": FONT, color: colour("text"), "line-height": 1.25,
          "text-background-color": colour("raised"), "text-background-opacity": 0.92, "text-background-padding": "2px", "text-background-shape": "round-rectangle",
        },
      },
      { selector: "edge.result", style: { "line-color": colour("kind-run"), "target-arrow-color": colour("kind-run") } },
      { selector: "edge.sent", style: { "line-style": "dashed" } },
      { selector: "edge.link", style: { width: 1, "line-style": "dotted", "line-color": colour("muted"), "target-arrow-color": colour("muted") } },
      { selector: "edge.waiting", style: { width: 3, "line-color": colour("bad"), "target-arrow-color": colour("bad"), color: colour("bad"), "font-weight": 600 } },
      { selector: "edge.chosen", style: { width: 3.5, "z-index": 9, "line-color": colour("brand"), "target-arrow-color": colour("brand"), "font-weight": 600, "font-size": 11 } },
    ]);
  }
}

// Cytoscape measures no labels.
const canvas = document.createElement("canvas").getContext("2d");
function size(node) {
  canvas.font = `11px ${FONT}`;
  const lines = node.data("label").split("\n");
  return [Math.max(40, ...lines.map((line) => canvas.measureText(line).width)), lines.length * 14.5];
}

function nodeClasses(node) {
  if (node.kind === "roots") return "roots";
  return node.kind !== "segment" || node.is_passed_on || (!node.operators.length && !node.num_leaves) ? "plain" : "";
}
