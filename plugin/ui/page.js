"use strict";
const $ = (id) => document.getElementById(id);
let page = 0, open = "", turn = 0, timer;

// make makes an element. All texts of the agent become text nodes, and never HTML.
function make(tag, properties, ...children) {
  const { name, ...rest } = properties || {};
  const e = Object.assign(document.createElement(tag), rest);
  if (name) e.dataset.name = name;
  e.append(...children);
  return e;
}

// set replaces the children of an element if they would differ, so that focus, scroll position and selection stay.
function set(e, ...children) {
  const next = make("div", {}, ...children);
  if (e.innerHTML !== next.innerHTML) e.replaceChildren(...next.childNodes);
}

async function poll() {
  clearTimeout(timer);
  const mine = ++turn;
  if (document.hidden) return;
  let state, error;
  try {
    const query = new URLSearchParams({ filter: $("filter").value, state: $("state").value, page, open });
    const response = await fetch("state?" + query);
    if (!response.ok) throw new Error(await response.text());
    state = await response.json();
  } catch (e) { error = e.message; }
  if (mine !== turn) return; // a newer question is on its way
  if (state) show(state); else live("fairlead ui does not answer (" + error + "); trying again");
  timer = setTimeout(poll, 2000);
}

function live(error, time) {
  document.body.classList.toggle("old", Boolean(error));
  set($("live"), error || "live, " + time);
}

const clock = (t) => new Date(t).toTimeString().slice(0, 8);
const problem = (p) => p.object + (p.field ? ": " + p.field : "") + ": " + p.reason;

function ago(from, to) {
  const s = (new Date(to) - new Date(from)) / 1000;
  const [n, unit] = s < 120 ? [s, "s"] : s < 7200 ? [s / 60, "min"] : s < 172800 ? [s / 3600, "h"] : [s / 86400, "d"];
  return `${Math.max(0, Math.floor(n))} ${unit} ago`;
}

function show(s) {
  const rate = (n) => !s.counts ? "not counted" : n == null ? "…" : n && n < 10 ? n.toFixed(1) : n.toFixed(0);
  const alarms = s.alarms || [], t = s.totals;
  live(s.error && "No answer of the agent: " + s.error + (s.rows?.length ? ". What follows is of " + clock(s.now) : ""), clock(s.now));
  set($("facts"), ...(s.facts || []).map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text))));
  set($("status"), s.status);
  $("alarms").hidden = !alarms.length;
  set($("alarm-list"), ...alarms.map((text) => make("li", {}, text)));
  set($("totals"), `${t.services} Services, ${t.wrong} ports with something wrong. Endpoints: ${t.ready} ready, ${t.draining} draining, `
    + `${t.excluded} excluded. Connections/s: ${rate(t.rate)}, failed: ${rate(t.failedRate)}.`);
  page = s.page;
  set($("where"), `page ${page + 1} of ${s.pages}, ${s.matching} ports`);
  $("previous").disabled = page === 0;
  $("next").disabled = page >= s.pages - 1;
  set($("none"), s.matching ? "" : s.error ? "Nothing is known." : t.services ? "No Service matches." : "There are no Services.");
  showRows(s, rate);
  set($("events"), ...(s.events || []).map(event));
}

// showRows keeps the rows that are there already, and puts new ones and moved ones in order.
function showRows(s, rate) {
  const body = $("rows"), old = new Map([...body.children].map((e) => [e.dataset.key, e]));
  const keep = (key, className, cells) => {
    const e = old.get(key) || make("tr", { className });
    e.dataset.key = key;
    cells.forEach((cell, i) => e.children[i] ? replace(e.children[i], cell) : e.append(cell));
    return e;
  };
  const next = (s.rows || []).flatMap((r) => [keep(r.key, "row", cells(r, s.now, rate)),
    ...(r.key === open ? [keep("open " + r.key, "detail", [detail(r, s.open)])] : [])]);
  if (next.length === body.children.length && next.every((e, i) => e === body.children[i])) return;
  const focused = document.activeElement;
  body.replaceChildren(...next);
  if (body.contains(focused)) focused.focus({ preventScroll: true });
}

// replace keeps a cell that says the same. The button in it keeps the focus when its state changes.
function replace(old, cell) {
  const a = old.querySelector(".toggle"), b = cell.querySelector(".toggle");
  if (!a || !b) return set(old, ...cell.childNodes);
  a.ariaExpanded = b.ariaExpanded;
  if (old.innerHTML !== cell.innerHTML) old.replaceChildren(a, ...[...cell.childNodes].slice(1));
}

const chip = (className, text) => make("span", { className: "chip " + className }, text);

function addresses(p, all) {
  const list = (p.addresses || []).map((a) => (a.kind === "ClusterIP" ? "" : a.kind + " ") + a.address
    + (a.owner ? ` (taken by ${a.owner})` : a.verdict === "forward" ? "" : ` (${a.verdict})`));
  return all || list.length <= 3 ? list.join(", ") : list.slice(0, 2).join(", ") + `, ${list.length - 2} more`;
}

function cells(r, now, rate) {
  const toggle = make("button", { type: "button", className: "toggle", ariaExpanded: String(r.key === open) }, r.service);
  toggle.onclick = () => { open = open === r.key ? "" : r.key; poll(); };
  const wrong = r.state ? [make("br"), chip(r.ignored && !r.problems ? "zero" : "wrong", r.state)] : [];
  const ends = ["ready", "draining", "excluded"].filter((s) => r[s]).map((s) => chip(s, r[s] + " " + s));
  return [
    make("th", { scope: "row" }, toggle, ...wrong), make("td", { name: "port" }, r.key.slice(r.service.length + 1)),
    make("td", {}, addresses(r)), make("td", {}, ...(ends.length ? ends : ["none"])),
    make("td", { className: "n", name: "connections/s" }, rate(r.rate)), make("td", { className: "n", name: "failed/s" }, rate(r.failedRate)),
    make("td", { name: "changed" }, r.changed ? ago(r.changed, now) : ""),
  ];
}

// detail is what the agent says of the row that is open: its endpoints, those first that take no new connections.
function detail(r, answer) {
  const s = answer?.services?.find((s) => s.service === r.service), p = s?.ports?.find((p) => p.port === r.port && p.name === r.name);
  const says = (className, text) => text ? [make("p", { className }, text)] : [];
  const notes = [...(r.problems || []).flatMap((p) => says("bad", problem(p))), ...says("bad", answer?.error),
    ...says("", r.ignored && "Not served: " + r.ignored)];
  if (!p) return make("td", { colSpan: 7 }, ...notes, ...says("", !answer?.error && "asking the agent …"));
  const list = (p.endpoints || []).sort((a, b) => (a.state === "ready") - (b.state === "ready")), first = list.slice(0, 200);
  const total = list.reduce((sum, e) => sum + (e.weight || 0), 0), percent = (n, of) => of ? (100 * n / of).toFixed(1) + " %" : "";
  const line = (e) => make("tr", {}, make("th", { scope: "row" }, e.address), make("td", { name: "node" }, e.node || ""),
    make("td", {}, chip(e.state, e.state)), make("td", {}, (e.reason || "") + (e.outside ? "; for clients outside of the cluster: " + e.outside : "")),
    make("td", { name: "share" }, e.weight ? percent(e.weight, total) : ""), make("td", { name: "connections" }, !answer.counts ? "not counted"
      : [e.connections || 0, percent(e.connections || 0, p.connections), e.failed ? e.failed + " failed" : ""].filter((t) => t !== "").join(", ")));
  const heads = ["Endpoint", "Node", "State", "Reason", "Share", "Connections"].map((n) => make("th", { scope: "col" }, n));
  return make("td", { colSpan: 7 }, ...notes, ...says("", "Addresses: " + (addresses(p, true) || "none")),
    ...says("", s.affinity && "Session affinity: " + s.affinity), make("table", {}, make("caption", { className: "sr" }, "Endpoints of " + r.key),
      make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...first.map(line))),
    ...says("", list.length > first.length && `${list.length - first.length} more: fairlead services ${r.service}`));
}

function event(e) {
  const rest = Object.entries(e.details || {}).map(([k, v]) => ` ${k}=${v}`).join("");
  const kind = make("span", { className: ["problem", "error", "warning"].includes(e.kind) ? "bad" : "soft" }, e.kind);
  return make("li", {}, make("time", { dateTime: e.time }, clock(e.time)), " ", kind, " ",
    ...(e.service ? [make("b", {}, e.service), " "] : []), e.message + rest);
}

$("filter").oninput = $("state").onchange = () => { page = 0; poll(); };
$("controls").onsubmit = (e) => { e.preventDefault(); poll(); };
$("previous").onclick = () => { page--; poll(); };
$("next").onclick = () => { page++; poll(); };
document.onvisibilitychange = poll;
poll();
