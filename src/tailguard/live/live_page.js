"use strict";
// Draws the last view that the session published. Text reaches the page as text, never as markup.

const STALE_S = 15;
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
let view = null;
let lost = null;

function make(tag, text, style) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (style) node.className = style;
  return node;
}

function shape(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

const fixed = (value, digits) => value === null ? "–" : value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const signed = (value, digits) => (value < 0 ? "−" : "+") + fixed(Math.abs(value), digits);
const percent = (share, digits = 0) => (share < 0 ? "−" : "") + fixed(100 * Math.abs(share), digits) + " %";
const moment = (ms) => new Date(ms).toISOString().slice(0, 16).replace("T", " ") + " UTC";

function span(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${fixed(seconds / 3600, 1)} h`;
}

function number(label, value, note) {
  const box = make("div");
  box.append(make("span", label), make("strong", value), make("span", note || ""));
  return box;
}

function drawNumbers() {
  const box = byId("numbers");
  box.replaceChildren();
  if (!view.decision) return;
  const sincePublished = Math.max(0, (Date.now() - view.published_ms) / 1000);
  const age = view.age_s + (view.state === "ended" ? 0 : sincePublished);
  box.append(
    number("equity", fixed(view.equity, 4), view.simulated ? "simulated" : fixed(view.money, 2) + " in money"),
    number("below its peak", percent(view.drawdown, 2)),
    number("last bar closed", span(age) + " ago", moment(view.closed_ms)),
  );
  if (view.budget) {
    const { used, change, limit, age: bar, window } = view.budget;
    box.append(number("budget used", percent(used), `${percent(change, 2)} of ${percent(limit, 2)}, bar ${bar} of ${window}`));
  }
}

function drawChart() {
  const points = view.curve || [];
  byId("chart-box").hidden = points.length < 2;
  if (points.length < 2) return;
  const chart = byId("chart");
  chart.replaceChildren();
  const low = Math.min(1, ...points.map((p) => p[2]));
  const high = Math.max(1, ...points.map((p) => p[3]));
  const span = high - low || 1;
  const [first, last] = [points[0][0], points[points.length - 1][0]];
  const x = (time) => (800 * (time - first)) / (last - first || 1);
  const y = (equity) => 228 - (216 * (equity - low)) / span;
  const at = (p, value) => `${x(p[0]).toFixed(2)},${y(value).toFixed(2)}`;
  const band = points.map((p) => at(p, p[3])).concat(points.slice().reverse().map((p) => at(p, p[2])));
  chart.append(
    shape("polygon", { class: "band", points: band.join(" ") }),
    shape("line", { class: "start", x1: 0, x2: 800, y1: y(1), y2: y(1) }),
    shape("polyline", { class: "line", points: points.map((p) => at(p, p[1])).join(" ") }),
  );
  byId("chart-text").textContent =
    `Equity at the closes, ${moment(first)} to ${moment(last)}: lowest ${fixed(low, 4)}, highest ${fixed(high, 4)}. ` +
    "The dashed line is the start" + (view.curve_stride > 1 ? `; each point is ${view.curve_stride} closes.` : ".");
}

function drawPositions() {
  const table = byId("positions");
  table.replaceChildren();
  const strangers = (view.positions || []).some((row) => row.foreign !== 0);
  const head = make("tr");
  const sizes = view.simulated ? [] : ["ours"].concat(strangers ? ["not ours"] : []);
  for (const name of ["symbol", "weight at the close", "target"].concat(sizes)) head.append(make("th", name));
  table.append(head);
  for (const row of view.positions || []) {
    const line = make("tr");
    const cells = [row.symbol, signed(row.weight, 4), row.target === null ? "held" : signed(row.target, 4)];
    const held = [String(row.ours), String(row.foreign)].slice(0, sizes.length);
    for (const text of cells.concat(held)) line.append(make("td", text));
    table.append(line);
  }
  byId("orders").textContent = view.orders.length
    ? "Outcome unknown: " + view.orders.map((o) => `${o.quantity} ${o.symbol}, sent ${moment(o.sent_ms)}`).join("; ")
    : view.simulated ? "No orders: the account is simulated." : "The outcome of every order is known.";
}

function meter(name, used) {
  const box = make("div", undefined, used > 0.8 ? "meter high" : "meter");
  const text = make("div", undefined, "text");
  text.append(make("span", name), make("span", percent(used)));
  const bar = shape("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
  bar.append(shape("rect", { x: 0, y: 0, height: 8, width: (100 * Math.min(1, Math.max(0, used))).toFixed(2) }));
  box.append(text, bar);
  return box;
}

function drawLimits() {
  const box = byId("limits");
  box.replaceChildren();
  if (view.budget) box.append(meter("budget of this window", view.budget.used));
  for (const row of view.limits || []) box.append(meter(row.name, row.used));
}

function drawDecision() {
  const made = view.decision;
  let text = "None yet.";
  if (made) {
    text = made.flat ? "Closes all positions: features warm up." : `Made at the close of ${moment(made.made_ms)}.`;
    if (made.throttle < 1) text += ` Throttled to ${percent(made.throttle)}.`;
    if (made.shielded) text += " Reduced by the shield.";
  }
  byId("decision").textContent = text;
}

function push(name, share, most) {
  const box = make("div", undefined, share < 0 ? "push down" : "push");
  const text = make("div", undefined, "text");
  text.append(make("span", name), make("span", signed(share, 4)));
  const bar = shape("svg", { viewBox: "-100 0 200 8", preserveAspectRatio: "none", "aria-hidden": "true" });
  const width = (100 * Math.abs(share)) / most;
  bar.append(shape("rect", { x: share < 0 ? -width : 0, y: 0, height: 8, width }), shape("line", { x1: 0, x2: 0, y1: 0, y2: 8 }));
  box.append(text, bar);
  return box;
}

function drawMoved() {
  const box = byId("moved");
  box.replaceChildren();
  for (const [symbol, found] of Object.entries(view.moved || {})) {
    box.append(make("h3", `${symbol}: asked for ${signed(found.weight, 4)}, ${signed(found.typical, 4)} of it for typical inputs`));
    const most = Math.max(1e-9, Math.abs(found.others), ...found.moved.map((m) => Math.abs(m[1])));
    for (const [name, share, size] of found.moved) box.append(push(`${name}, at ${signed(size, 1)} sd`, share, most));
    box.append(push("all others", found.others, most));
  }
  if (box.childElementCount) box.append(make("p", "Before throttle and shield. The shares and the typical weight add up to what was asked for.", "soft"));
}

function drawAlarms() {
  const list = byId("alarms");
  list.replaceChildren();
  for (const alarm of view.alarms) {
    const item = make("li", undefined, alarm.active ? "active" : "");
    item.append(make("span", `${moment(alarm.time_ms)}  ${alarm.guard}`, "soft"), make("div", alarm.message));
    list.append(item);
  }
  if (!view.alarms.length) list.append(make("li", "None."));
}

function drawBlocked() {
  const box = byId("blocked");
  box.replaceChildren();
  const guards = Object.entries(view.frozen);
  box.hidden = view.killed === null && guards.length === 0;
  if (box.hidden) return;
  if (view.killed !== null) box.append(make("p", `Killed: ${view.killed}`));
  for (const [guard, message] of guards) box.append(make("p", `Increases are frozen by ${guard}: ${message}`));
  const way = make("p", "To go on, look at the account, then run ");
  way.append(make("code", view.command));
  box.append(way);
}

function drawLink() {
  const box = byId("link");
  const quiet = view && view.state !== "ended" && view.state !== "killed" ? (Date.now() - view.published_ms) / 1000 : 0;
  box.hidden = lost === null && quiet < STALE_S;
  if (lost !== null) box.textContent = `No answer from the session's process since ${moment(lost)}. What you see is its last word.`;
  else if (!box.hidden) box.textContent = `The session has published nothing for ${span(quiet)}.`;
}

function draw() {
  drawLink();
  if (!view) return;
  const calm = { trading: "good", waiting: "", ended: "" };
  byId("state").textContent = view.state;
  byId("state").className = "badge " + (calm[view.state] ?? "bad");
  byId("run").textContent = view.run;
  byId("mode").textContent = view.mode;
  document.title = `${view.state}: ${view.run}`;
  drawBlocked();
  drawNumbers();
  drawChart();
  drawPositions();
  drawLimits();
  drawDecision();
  drawMoved();
  drawAlarms();
}

async function update() {
  try {
    const answer = await fetch("state.json", { cache: "no-store" });
    view = await answer.json();
    lost = null;
  } catch {
    lost = lost ?? Date.now();
  }
  setTimeout(update, 1000);
  draw();
  document.documentElement.dataset.drawn = view ? "yes" : "waiting";
}

update();
