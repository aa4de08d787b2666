// Small parts that everything is built of, and what is chosen.

// An element; text reaches it as text alone.
function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
const fill = (id, ...children) => byId(id).replaceChildren(...children.filter((child) => child !== null && child !== undefined));
const token = (told) => el("bdi", { class: "tok", title: told[1]?.length > 15 && told[1] }, told[1] || `#${told[0]}`);
const named = (list, position) => el("span", {}, `${position} `, token(list[position]));
const rowOf = (cells, props = {}, tag = "td") => el("tr", props, ...cells.map((cell) => (cell instanceof Node && /^T[DH]$/.test(cell.tagName) ? cell : el(tag, {}, cell ?? ""))));
const num = (x, tag = "td") => el(tag, { class: "n" }, x);
const share = (x) => {
  const bar = el("i");
  bar.style.width = `${100 * Math.min(1, Math.max(0, Number.isFinite(x) ? x : 0))}%`;
  return el("td", { class: "share", "aria-hidden": "true" }, bar);
};
function table(head, rows, props = {}, caption = "") {
  const made = el("table", props);
  if (caption) made.append(el("caption", {}, caption));
  if (head.length) made.append(el("thead", {}, rowOf(head, {}, "th")));
  made.append(el("tbody", {}, ...rows));
  return made;
}

const [LAYER, HEAD, QUERY] = data.asked;
const LONG = 48; // positions; more of them are shaded by logarithm, for most weights are small
const state = { layer: LAYER, head: HEAD, query: QUERY, key: null, view: "weights", shade: "linear", lens: null };
const listeners = [];
const follow = (names, draw) => listeners.push({ names: names.split(" "), draw });
let pointed = {}; // query and key under the pointer

function choose(change) {
  const changed = Object.keys(change).filter((name) => state[name] !== change[name]);
  Object.assign(state, change);
  if (changed.length) listeners.filter((one) => one.names.some((name) => changed.includes(name))).forEach((one) => one.draw());
}
function point(where) {
  if (where.query === pointed.query && where.key === pointed.key) return;
  pointed = where;
  listeners.filter((one) => one.names.includes("pointed")).forEach((one) => one.draw());
}
const current = () => heads.get(nameOf(state.layer, state.head));
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

// One tab stop for many things: arrows move the focus among them. move(dx, dy) says which is next.
const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-1e9, 0], End: [1e9, 0], PageUp: [0, -1e9], PageDown: [0, 1e9] };
const arrows = (move) => (event) => {
  const step = STEPS[event.key];
  if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  move(...step);
};

// Colours of the theme, as numbers.
let palette = {};
function readPalette() {
  const style = getComputedStyle(document.documentElement), names = "paper raised ink soft line edge accent query bad low high below middle above hatch".split(" ");
  palette = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  const rgb = (name) => [1, 3, 5].map((i) => parseInt(palette[name].slice(i, i + 2), 16));
  const mix = (a, b, t) => rgb(a).map((x, i) => Math.round(x + (rgb(b)[i] - x) * t));
  const ramp = (color) => Array.from({ length: 256 }, (_, i) => color(i / 255));
  palette.one = ramp((t) => mix("low", "high", t));
  palette.two = ramp((t) => (t < 0.5 ? mix("middle", "below", 1 - 2 * t) : mix("middle", "above", 2 * t - 1)));
}
const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;
// Black or white, whichever stands out more (WCAG 2's luminance).
const linear = (x) => (x <= 10 ? x / 3294.6 : ((x / 255 + 0.055) / 1.055) ** 2.4);
const inkOn = ([r, g, b]) => (0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) > 0.179 ? "#000" : "#fff");
