// Receives the state of the cluster, and shows it. The page never writes anything.

import { bytes, clock, duration, make, makeSvg, pill, plural, rate, shortName } from "./format.js";
import { Graph, messageLabel } from "./graph.js";
import { Timeline } from "./timeline.js";

const HISTORY = 30;
const LONG_S = 1;
const QUIET_MS = 5_000;
const STATES = { running: "good", lost: "bad", ended: "", starting: "warn", restarting: "warn", leaving: "warn" };

const find = (id) => document.getElementById(id);
const rates = new Map(); // calls per second of each worker, the latest last
const states = new Map(); // of workers
let workerNames = [];
let step = null;
let chosenStep = "";
let chosenMessage = null;
let source = null;
let tickedAt = performance.now();
let graph = null;
const timeline = new Timeline(find("timeline-area"), find("timeline-detail"), find("timeline-legend"));

// -- the stream ----------------------------------------------------------------------------------------------------------

const show = { cluster: showCluster, workers: showWorkers, steps: showSteps, step: showStep, errors: showErrors, references: showReferences };

function connect() {
  source?.close();
  source = new EventSource(`/events?step=${encodeURIComponent(chosenStep)}`);
  for (const [name, function_] of Object.entries(show)) source.addEventListener(name, (event) => function_(JSON.parse(event.data)));
  source.addEventListener("tick", (event) => {
    tickedAt = performance.now();
    setLive("live", "live");
    document.documentElement.dataset.tick = event.data;
  });
  source.addEventListener("closed", () => {
    source.close();
    setLive("closed", "the cluster is closed");
  });
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED) setLive("lost", "not connected; reload to try again");
    else setLive("lost", "the driver does not answer");
  });
}

// The connection may be fine while the driver cannot ask its workers.
function checkNews() {
  if (["connecting", "live"].includes(find("live").dataset.state) && performance.now() - tickedAt > QUIET_MS) setLive("lost", "no news from the driver");
}

function setLive(state, text) {
  const live = find("live");
  const label = live.querySelector("span");
  if (live.dataset.state === state && label.textContent === text) return;
  live.dataset.state = state;
  label.textContent = text;
}

// -- workers -------------------------------------------------------------------------------------------------------------

function showCluster(cluster) {
  find("cluster-name").textContent = cluster.name;
  find("cluster-detail").textContent = `driver process ${cluster.pid}`;
  find("version").textContent = `gradwire ${cluster.version}`;
  document.title = `${cluster.name} · gradwire`;
}

function showWorkers(workers) {
  workerNames = workers.map((worker) => worker.name);
  const counts = {};
  for (const worker of workers) {
    states.set(worker.name, worker.state);
    if (!worker.is_driver) counts[worker.state] = (counts[worker.state] || 0) + 1;
    const history = rates.get(worker.name) || [];
    history.push(worker.calls_per_s ?? 0);
    rates.set(worker.name, history.slice(-HISTORY));
  }
  find("workers-summary").replaceChildren(...Object.entries(counts).map(([state, count]) => pill(STATES[state] ?? "", `${count} ${state}`)));
  // Rows are changed in place: the focus stays where it is.
  const body = find("workers-rows");
  const rows = new Map([...body.children].map((row) => [row.dataset.worker, row]));
  const ordered = [...workers].sort((a, b) => b.is_driver - a.is_driver);
  ordered.forEach((worker, index) => {
    const row = rows.get(worker.name) || makeRow(worker);
    rows.delete(worker.name);
    fillRow(row, worker);
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] || null);
  });
  for (const row of rows.values()) row.remove();
  if (step) showGraph();
}

function makeRow(worker) {
  const button = make("button", { type: "button", "aria-label": `Stacks of ${worker.name}` }, "Stacks");
  button.addEventListener("click", () => showStacks(worker.name));
  const labels = ["", "State", "Host", "Device", "Memory", "Calls/s", "Running", "Queue", "Sent / received", "Last seen"];
  const classes = ["name", "state", "", "", "num", "num", "num", "num", "num wide", "num"];
  const cells = labels.map((label, index) => make("td", { class: classes[index] || null, "data-label": label }));
  return make("tr", { "data-worker": worker.name }, ...cells, make("td", { class: "stacks num" }, button));
}

function fillRow(row, worker) {
  const isLost = worker.state === "lost";
  const isSilent = worker.state === "running" && !worker.has_answered;
  row.className = isLost ? "lost" : isSilent ? "silent" : "";
  row.dataset.state = worker.state;
  const [name, state, host, device, memory, calls, running, queue, traffic, seen] = row.cells;
  const details = [`rank ${worker.rank}`, worker.role === "worker" ? null : worker.role, worker.pid ? `pid ${worker.pid}` : null, worker.restarts ? plural(worker.restarts, "restart") : null];
  name.replaceChildren(make("strong", {}, worker.name), make("small", {}, details.filter(Boolean).join(" · ")));
  const shown = isSilent ? pill("warn", "no answer") : pill(STATES[worker.state] ?? "", worker.state);
  state.replaceChildren(shown, worker.exit_reason ? make("span", { class: "reason" }, worker.exit_reason) : null ?? "");
  host.textContent = worker.host || "this machine";
  device.textContent = worker.device || "cpu";
  memory.textContent = worker.device_bytes ? `${bytes(worker.rss_bytes)} + ${bytes(worker.device_bytes)}` : bytes(worker.rss_bytes);
  calls.replaceChildren(make("span", { class: "rate" }, sparkline(rates.get(worker.name)), make("span", {}, rate(worker.calls_per_s))));
  const longest = worker.calls?.[0];
  running.replaceChildren(String(worker.num_running ?? "–"), longest && longest.seconds > LONG_S ? make("small", { class: "muted" }, `${shortName(longest.function)} ${duration(longest.seconds)}`) : "");
  queue.textContent = worker.num_queued ?? "–";
  traffic.textContent = worker.bytes_sent === undefined || worker.bytes_sent === null ? "–" : `${bytes(worker.bytes_sent)} / ${bytes(worker.bytes_received)}`;
  seen.textContent = worker.last_seen_s === null ? "–" : worker.last_seen_s < 2 ? "now" : `${duration(worker.last_seen_s)} ago`;
}

function sparkline(history) {
  const most = Math.max(...history, 1e-9);
  const points = history.map((value, index) => `${76 - (history.length - 1 - index) * (76 / HISTORY)},${18.5 - (value / most) * 16}`);
  return makeSvg("svg", { viewBox: "0 0 76 20", "aria-hidden": "true" }, makeSvg("polyline", { points: points.join(" ") }));
}

// -- the step ------------------------------------------------------------------------------------------------------------

function showSteps(steps) {
  const choice = find("step-choice");
  const options = steps.map((item) => {
    const what = item.is_stalled ? "waiting" : item.is_open ? "open" : duration(item.duration_s);
    return make("option", { value: item.id }, `${clock(item.seen_at)} · ${item.maker} · ${plural(item.num_messages, "message")} · ${what}`);
  });
  const isGone = chosenStep && !steps.some((item) => item.id === chosenStep);
  const kept = isGone ? [make("option", { value: chosenStep }, "no longer there")] : [];
  // Do not change an open list; some browsers do not know the selector, and throw.
  if (document.activeElement === choice && CSS.supports("selector(:open)") && choice.matches(":open")) return;
  choice.replaceChildren(make("option", { value: "" }, "latest"), ...options, ...kept);
  choice.value = chosenStep;
}

function showStep(data) {
  step = data;
  const pills = find("step-state");
  pills.replaceChildren();
  if (step?.is_stalled) pills.append(pill("bad", `waiting for ${duration(step.updated_at - step.seen_at)}`));
  else if (step?.is_open) pills.append(pill("warn", "open"));
  else if (step?.id) pills.append(pill("", `by ${step.maker} at ${clock(step.seen_at)}`));
  showGraph();
  showTimeline();
}

function showGraph() {
  const data = step?.graph;
  find("graph-empty").hidden = Boolean(data);
  find("graph-area").hidden = !data;
  find("graph-notes").hidden = !data?.notes.length;
  if (!data) return;
  graph ??= new Graph(find("graph"), choose);
  graph.show(data, states);
  find("graph-notes").textContent = data.notes.join(" ");
  const worker = new Map(data.nodes.map((node) => [node.id, node.worker]));
  find("messages-count").textContent = data.num_messages;
  const list = find("messages");
  const hadFocus = list.contains(document.activeElement) ? [...list.querySelectorAll("button")].indexOf(document.activeElement) : -1;
  list.replaceChildren(...data.messages.map((message, index) => messageItem(message, `m:${index}`, worker)));
  if (hadFocus >= 0) list.querySelectorAll("button")[hadFocus]?.focus({ preventScroll: true });
  find("waits").hidden = !step.waits.length;
  find("waits-list").replaceChildren(...step.waits.map(waitItem));
  choose(chosenMessage);
}

function messageItem(message, id, worker) {
  const state = message.waits_for ? `waits for ${message.waits_for}` : message.has_arrived ? (message.time_s === null || message.time_s === undefined ? "" : duration(message.time_s)) : "on its way";
  const button = make(
    "button",
    { type: "button", class: message.waits_for ? "waiting" : null, "data-id": id, "aria-pressed": "false", title: message.site || message.function },
    make("span", { class: "what" }, messageLabel(message)),
    make("span", { class: "size" }, bytes(message.num_bytes)),
    make("span", { class: "way" }, `${worker.get(message.source)} → ${worker.get(message.target)}`),
    make("span", { class: "time" }, state),
  );
  button.addEventListener("click", () => choose(chosenMessage === id ? null : id));
  return make("li", {}, button);
}

function choose(id) {
  chosenMessage = id;
  graph?.select(id);
  for (const button of find("messages").querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.id === id));
}

function waitItem(wait) {
  if (wait.kind === "computes") return make("li", {}, make("strong", {}, wait.worker), " computes");
  if (wait.kind === "passes on") {
    const reason = make("small", {}, "it passed the tensor on untouched, and the gradient comes from there");
    return make("li", {}, make("strong", {}, wait.worker), " waits for ", make("strong", {}, wait.for), reason);
  }
  const via = wait.via ? `, which ${wait.via} passed on` : "";
  return make(
    "li",
    { class: "waits-for" },
    make("strong", {}, wait.worker),
    " waits for ",
    make("strong", {}, wait.for),
    make("small", {}, `the gradient of ${shortName(wait.function)}${via}${wait.site ? `, sent at ${wait.site}` : ""}`.replace(", sent at its result", ", its result")),
  );
}

function showTimeline() {
  const spans = step?.spans ?? [];
  find("timeline-empty").hidden = spans.length > 0;
  find("timeline-area").hidden = !spans.length;
  find("timeline-legend").hidden = !spans.length;
  find("timeline-summary").textContent = spans.length ? `${duration(Math.max(...spans.map((span) => span.end_ms)) / 1e3)}, ${plural(spans.length, "span")}` : "";
  if (spans.length) timeline.show(spans, [...workerNames].sort((a, b) => (b === step.maker) - (a === step.maker)));
}

// -- errors, references, stacks ------------------------------------------------------------------------------------------

function showErrors(errors) {
  find("errors-empty").hidden = errors.length > 0;
  const count = errors.filter((item) => item.level === "error").length;
  find("errors-badge").hidden = !count;
  find("errors-badge").textContent = count;
  find("errors-list").replaceChildren(
    ...errors.map((item) =>
      make(
        "li",
        {},
        pill(item.level === "error" ? "bad" : "warn", item.worker),
        make("span", { class: "text" }, make("span", { class: "muted" }, `${item.kind.replace("_", " ")} `), item.text, item.count > 1 ? make("span", { class: "muted" }, ` × ${item.count}`) : null),
        make("time", {}, clock(item.last_at)),
      ),
    ),
  );
}

function showReferences(references) {
  const rows = references.filter((item) => item.num_values || item.holders.length || item.num_pending);
  find("references-empty").hidden = rows.length > 0;
  find("references-table").hidden = !rows.length;
  find("references-rows").replaceChildren(
    ...rows.map((item) =>
      make(
        "tr",
        {},
        make("td", {}, make("strong", {}, item.owner)),
        make("td", { class: "num" }, String(item.num_values)),
        make("td", {}, make("span", { class: "pills" }, ...item.holders.map((holder) => pill("", `${holder.worker} ${holder.count}`)))),
        make("td", { class: "num" }, String(item.num_pending)),
      ),
    ),
  );
}

async function showStacks(worker) {
  const dialog = find("stacks");
  find("stacks-title").textContent = `Stacks of ${worker}`;
  find("stacks-by").textContent = "asking …";
  find("stacks-threads").replaceChildren();
  find("stacks-again").onclick = () => showStacks(worker);
  if (!dialog.open) dialog.showModal();
  let found;
  try {
    const answer = await fetch(`/api/stacks?worker=${encodeURIComponent(worker)}`);
    found = await answer.json();
  } catch {
    found = { error: "the driver does not answer" };
  }
  find("stacks-by").textContent = found.error ? "" : `${plural(found.threads.length, "thread")}, from ${found.by}`;
  find("stacks-threads").replaceChildren(...(found.error ? [make("p", { class: "empty" }, found.error)] : byInterest(found.threads).map(threadItem)));
}

// Threads of the program before those that only serve gradwire.
function byInterest(threads) {
  const isWaiting = (thread) => thread.frames.every((frame) => isOurs(frame) || isPython(frame));
  return threads.map((thread) => ({ ...thread, isWaiting: isWaiting(thread) })).sort((a, b) => a.isWaiting - b.isWaiting);
}

const isOurs = (frame) => /(^|[/\\])gradwire[/\\]/.test(frame.file);
const isPython = (frame) => /[/\\]python3\.\d+[/\\](?!site-packages)/.test(frame.file) || frame.file.startsWith("<");

function threadItem(thread) {
  const top = thread.frames[0];
  const where = top ? `${top.function} (${shortFile(top.file)}:${top.line})` : "";
  return make(
    "details",
    { open: !thread.isWaiting },
    make("summary", { class: thread.isWaiting ? "ours" : null }, thread.name, thread.state === "running" ? pill("good", "running") : null, make("span", { class: "where mono" }, where)),
    make("ol", { class: "mono" }, ...thread.frames.map((frame) => make("li", { class: isOurs(frame) ? "ours" : null }, make("span", {}, frame.function), make("span", { class: "file" }, `${shortFile(frame.file)}:${frame.line}`)))),
  );
}

const shortFile = (file) => file.split(/[/\\]/).slice(-2).join("/");

// -- start ---------------------------------------------------------------------------------------------------------------

find("step-choice").addEventListener("change", (event) => {
  chosenStep = event.target.value;
  connect();
});
find("graph-in").addEventListener("click", () => graph?.zoom(1.25));
find("graph-out").addEventListener("click", () => graph?.zoom(0.8));
find("graph-fit").addEventListener("click", () => graph?.fit());
find("time-in").addEventListener("click", () => timeline.zoom(1.6));
find("time-out").addEventListener("click", () => timeline.zoom(1 / 1.6));
find("time-fit").addEventListener("click", () => timeline.zoom(0));
find("stacks-close").addEventListener("click", () => find("stacks").close());
setInterval(checkNews, 1_000);
connect();
