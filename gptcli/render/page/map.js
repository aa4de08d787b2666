// A head as a map: rows are queries, columns keys. Four views of the same pairs.

const VIEWS = {
  scores: { label: "q·k", tab: "scores", of: (head) => head.productOf, hides: false },
  scaled: { label: "score", tab: "scaled", of: (head) => head.scaledOf, hides: false },
  masked: { label: "score", tab: "masked", of: (head) => head.scaledOf, hides: true },
  weights: { label: "weight", tab: "weights", of: (head) => head.weight, hides: true },
};
const DECADES = 4; // a logarithmic shade goes down so many powers of ten

function readings(head, view) {
  const of = VIEWS[view].of(head), { hides } = VIEWS[view];
  let low = Infinity, high = -Infinity;
  for (let q = 0; q < head.T; q++)
    for (let k = 0; k < head.S; k++) {
      if (hides && !head.sees(q, k)) continue;
      const x = of(q, k);
      if (Number.isFinite(x)) { if (x < low) low = x; if (x > high) high = x; }
    }
  if (view === "weights") { low = 0; if (head.sinkOf) for (let q = 0; q < head.T; q++) high = Math.max(high, head.sinkOf(q)); }
  return low > high ? [0, 1] : [low, high];
}

// Where a number stands in the colours: 0 to 255.
function shader(view, [low, high]) {
  if (view === "weights") {
    const floor = high * 10 ** -DECADES;
    const place = state.shade === "log" ? (x) => (x <= floor ? 0 : Math.log(x / floor) / Math.log(high / floor)) : (x) => x / (high || 1);
    return (x) => clamp(Math.round(255 * place(x)), 0, 255);
  }
  const span = Math.max(Math.abs(low), Math.abs(high)) || 1;
  return (x) => clamp(Math.round(127.5 + (127.5 * x) / span), 0, 255);
}

const geometry = {}; // of what is drawn: where cells lie

function drawMap() {
  const head = current(), of = VIEWS[state.view].of(head), { hides } = VIEWS[state.view];
  const [base, over] = byId("map").children, context = base.getContext("2d");
  const rem = parseFloat(getComputedStyle(document.documentElement).fontSize), ratio = window.devicePixelRatio || 1;
  const room = byId("map").clientWidth || 600, { T, S } = head, sink = state.view === "weights" && head.sinkOf ? 2 : 0;
  const font = (size) => `${(size * rem).toFixed(1)}px ${getComputedStyle(byId("token")).fontFamily}`;
  const name = (list, i) => { const text = `${i} ${list[i][1] || "#" + list[i][0]}`; return text.length > 16 ? `${text.slice(0, 15)}…` : text; };
  context.font = font(0.8);
  const wide = (list) => Math.max(...list.map((_, i) => context.measureText(name(list, i)).width));
  const every = Math.max(T, S) <= LONG; // a name for each row and column
  const left = Math.min(every ? wide(data.queries) : 9 * rem * 0.8, room * 0.3) + 0.8 * rem;
  const fits = (room - left) / (S + sink), cell = clamp(fits, 0, Math.min(4 * rem, (44 * rem) / Math.max(T, S + sink)));
  const unit = cell >= 3 ? Math.floor(cell) : cell, size = 0.8 * rem, named = unit >= size * 0.95;
  const top = Math.min(every ? wide(data.keys) : 6 * rem, 8 * rem) * 0.72 + 1.4 * rem, width = left + (S + sink) * unit, height = top + T * unit;
  const lean = 4 * rem; // of the last column's name
  Object.assign(geometry, { left, top, unit, T, S, sink });
  for (const canvas of [base, over]) {
    canvas.width = Math.ceil(Math.min(width + lean, room) * ratio);
    canvas.height = Math.ceil((height + 2) * ratio);
    canvas.style.width = `${canvas.width / ratio}px`;
    canvas.style.height = `${canvas.height / ratio}px`;
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  }
  if (!of) {
    context.fillStyle = palette.soft;
    context.font = font(0.95);
    `Scores of this head are not in this file.\n${data.replayed ? "The trace's file lacks them." : `Add --layer ${head.layer + 1} --head ${head.head} to the command.`}`.split("\n").forEach((line, i) => context.fillText(line, 0.3 * rem, (2 + 1.6 * i) * rem));
    geometry.unit = 0;
    fill("legend");
    return drawOver();
  }
  const range = readings(head, state.view), shade = shader(state.view, range), colors = state.view === "weights" ? palette.one : palette.two;
  // What is hidden is hatched; the rest lies above.
  context.save();
  context.strokeStyle = palette.hatch;
  context.beginPath();
  context.rect(left, top, S * unit, T * unit);
  context.clip();
  context.beginPath();
  for (let x = -T * unit; x < S * unit; x += 5) { context.moveTo(left + x, top + T * unit); context.lineTo(left + x + T * unit, top); }
  context.stroke();
  context.restore();
  const image = new ImageData(S + sink, T), cells = new Uint32Array(image.data.buffer), bad = [];
  const packed = colors.map(([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r);
  const put = (q, column, x) => {
    if (!Number.isFinite(x)) bad.push([q, column]);
    cells[q * (S + sink) + column] = Number.isFinite(x) ? packed[shade(x)] : 0xffffffff;
  };
  for (let q = 0; q < T; q++) {
    for (let k = 0; k < S; k++) if (!hides || head.sees(q, k)) put(q, k, of(q, k));
    if (sink) put(q, S + 1, head.sinkOf(q));
  }
  const small = new OffscreenCanvas(S + sink, T);
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = unit < 1;
  context.drawImage(small, left, top, (S + sink) * unit, T * unit);
  context.direction = "ltr";
  context.textBaseline = "middle";
  if (unit >= 2.7 * rem) {
    context.font = font(0.78);
    context.textAlign = "center";
    for (let q = 0; q < T; q++)
      for (let k = 0; k < S + sink; k++) {
        if (k === S || (k < S && hides && !head.sees(q, k))) continue;
        const x = k < S ? of(q, k) : head.sinkOf(q);
        context.fillStyle = Number.isFinite(x) ? inkOn(colors[shade(x)]) : "#a00000";
        context.fillText(Number.isFinite(x) ? x.toFixed(2) : shown(x), left + (k + 0.5) * unit, top + (q + 0.5) * unit);
      }
  } else {
    context.fillStyle = palette.bad; // a bar marks what is no number
    for (const [q, k] of bad) context.fillRect(left + k * unit, top + q * unit, Math.max(unit, 1.5), Math.max(unit / 4, 1.5));
  }
  context.font = font(0.8);
  context.fillStyle = palette.soft;
  const step = named ? 1 : Math.ceil((size * 1.3) / unit / 5) * 5 || 1;
  context.textAlign = "right";
  for (let q = 0; q < T; q += step) context.fillText(every ? name(data.queries, q) : name(data.queries, q).slice(0, 13), left - 0.4 * rem, top + (q + 0.5) * unit, left - 0.5 * rem);
  context.textAlign = "left";
  const column = (text, k) => {
    context.save();
    context.translate(left + (k + 0.5) * unit, top - 0.35 * rem);
    context.rotate(-Math.PI / 4);
    context.fillText(text, 0, 0);
    context.restore();
  };
  for (let k = 0; k < S; k += named ? 1 : 2 * step) column(every ? name(data.keys, k) : name(data.keys, k).slice(0, 11), k);
  if (sink) column("sink", S + 1);
  context.strokeStyle = palette.line;
  context.strokeRect(left - 0.5, top - 0.5, S * unit + 1, T * unit + 1);
  drawLegend(range, colors, hides, head);
  drawOver();
}

function drawLegend([low, high], colors, hides, head) {
  const ramp = el("i", { "aria-hidden": "true" }), weights = state.view === "weights", span = Math.max(Math.abs(low), Math.abs(high));
  ramp.style.background = `linear-gradient(90deg, ${[0, 51, 102, 153, 204, 255].map((i) => css(colors[i])).join(",")})`;
  const [from, to] = weights ? [state.shade === "log" ? high * 10 ** -DECADES : 0, high] : [-span, span];
  const near = weights ? head.near : head.nearScores;
  fill("legend", el("span", { class: "num" }, about(from, near)), ramp, el("span", { class: "num" }, about(to, near)),
    weights && state.shade === "log" ? "and less, by its logarithm" : null,
    ...(hides && head.masks ? [el("i", { class: "hidden", "aria-hidden": "true" }), "hidden by the mask"] : []),
    near ? "≈ in steps: see below" : null);
}

// The row and the column that are chosen or pointed at: a query's row in whole lines, a key's column in broken ones.
function drawOver() {
  const over = byId("map").children[1], context = over.getContext("2d"), { left, top, unit, T, S } = geometry;
  context.clearRect(0, 0, over.width, over.height);
  if (!unit) return;
  const row = (q, color, width) => { context.setLineDash([]); context.lineWidth = width; context.strokeStyle = color; context.strokeRect(left - 1, top + q * unit - 0.5, S * unit + 2, Math.max(unit, 2) + 1); };
  const column = (k, color, width) => { context.setLineDash([4, 3]); context.lineWidth = width; context.strokeStyle = color; context.strokeRect(left + k * unit - 0.5, top - 1, Math.max(unit, 2) + 1, T * unit + 2); };
  row(state.query, palette.query, 2);
  if (state.key !== null) column(state.key, palette.query, 2);
  if (pointed.query !== undefined) row(pointed.query, palette.accent, 1.5);
  if (pointed.key !== undefined) column(pointed.key, palette.accent, 1.5);
}

function drawCell() {
  const head = current(), query = pointed.query ?? state.query, key = pointed.key ?? state.key;
  const item = (term, ...told) => el("div", {}, el("dt", {}, term), el("dd", {}, ...told));
  const n = (x, near) => el("span", { class: "num" }, about(x, near));
  if (key === null) return fill("cell", item("query", named(data.queries, query)), item("point at a cell", el("span", { class: "dim" }, "or go there by the arrows")));
  const sees = head.sees(query, key), walk = walkOf(state.layer, state.head, query);
  const exact = walk && { product: numbers(walk.product)[key], score: numbers(walk.scaled)[key], weight: numbers(walk.weight)[key] };
  fill("cell",
    item("query", named(data.queries, query)), item("key", named(data.keys, key)),
    head.productOf || exact ? item("q·k", exact ? n(exact.product) : n(head.productOf(query, key), head.nearScores)) : null,
    head.scaledOf || exact ? item("score", exact ? n(exact.score) : n(head.scaledOf(query, key), head.nearScores)) : null,
    item("mask", sees ? "seen" : "hidden (−∞)"),
    item("weight", exact ? n(exact.weight) : n(head.weight(query, key), head.near)),
    head.sinkOf ? item("the query's sink", n(head.sinkOf(query), head.near)) : null);
}

function drawHead() {
  const head = current(), { layer } = state;
  const kind = { self: "", cross: "Cross attention · ", encoder: "Encoder · " }[data.attention];
  byId("head-title").textContent = `${kind}Layer ${layer + 1} of ${data.layers} (${head.path}) · Head ${head.head} of ${head.heads} = ${nameOf(layer, head.head)}`;
  const mates = [...heads.values()].filter((one) => one.layer === layer && one.kv === head.kv && one.head !== head.head).map((one) => one.head);
  const told = [`score = ${head.score}`, head.causal ? "sees what came before" : data.attention === "cross" ? "sees all of the source" : "sees both ways"];
  if (head.window) told.push(`window of ${head.window} keys${head.causal ? "" : " to each side"}`);
  if (head.kvs < head.heads) told.push(`reads key/value head ${head.kv} of ${head.kvs}${mates.length ? `, as ${mates.length > 1 ? "heads" : "head"} ${mates.join(", ")} too` : ""}`);
  if (head.sinkOf) told.push("the softmax has a sink beside the keys");
  byId("head-about").textContent = told.join(" · ");
  byId("map").setAttribute("aria-label", `Map of ${VIEWS[state.view].tab}: rows are queries, columns keys. Arrows move.`);
}

function drawReads() {
  const head = current(), { query } = state, walk = walkOf(state.layer, state.head, query);
  const exact = walk && numbers(walk.weight), weight = (k) => (exact ? exact[k] : head.weight(query, k)), near = !exact && head.near;
  const seen = data.keys.map((_, k) => k).filter((k) => head.sees(query, k) || weight(k) !== 0);
  const most = [...seen].sort((a, b) => (weight(b) || 0) - (weight(a) || 0) || a - b).slice(0, 12);
  fill("reads-title", "What ", named(data.queries, query), " reads");
  const row = (k) => {
    const made = rowOf([el("td", {}, named(data.keys, k)), num(about(weight(k), near)), share(weight(k))], { class: k === state.key ? "chosen opens" : "opens", onclick: () => choose({ key: k }) });
    made.addEventListener("pointerenter", () => point({ query, key: k }));
    made.addEventListener("pointerleave", () => point({}));
    return made;
  };
  const rows = most.map(row);
  if (head.sinkOf) rows.push(rowOf(["sink", num(about(head.sinkOf(query), near)), share(head.sinkOf(query))], { class: "sum" }));
  fill("read", table(["key", num("weight", "th"), ""], rows, { class: "list" }), seen.length > most.length ? el("p", { class: "dim" }, `the heaviest ${most.length} of ${seen.length} keys`) : null);
}

function startMap() {
  fill("map", el("canvas", { "aria-hidden": "true" }), el("canvas", { "aria-hidden": "true" }));
  const map = byId("map"), names = Object.keys(VIEWS);
  map.tabIndex = 0;
  if (Math.max(data.queries.length, data.keys.length) > LONG) state.shade = "log";
  byId("shade").value = state.shade;
  byId("shade").addEventListener("change", (event) => choose({ shade: event.target.value }));
  const tabs = names.map((name) => el("button", { type: "button", role: "tab", id: `view-${name}`, "aria-controls": "map", onclick: () => choose({ view: name }) }, VIEWS[name].tab));
  fill("views", ...tabs);
  byId("views").addEventListener("keydown", arrows((dx, dy) => {
    const to = clamp(names.indexOf(state.view) + (dx || dy), 0, 3);
    choose({ view: names[to] });
    tabs[to].focus();
  }));
  const place = (event) => {
    const box = map.getBoundingClientRect(), { left, top, unit, T, S } = geometry;
    const k = Math.floor((event.clientX - box.left - left) / unit), q = Math.floor((event.clientY - box.top - top) / unit);
    return unit && q >= 0 && q < T && k < S ? { query: q, key: k >= 0 ? k : undefined } : q < 0 && k >= 0 && k < S ? { key: k } : {};
  };
  map.addEventListener("pointermove", (event) => point(place(event)));
  map.addEventListener("pointerleave", () => point({}));
  map.addEventListener("click", (event) => { const { query, key } = place(event); if (query !== undefined) choose({ query, key: key ?? state.key }); });
  map.addEventListener("keydown", arrows((dx, dy) => choose({
    query: clamp(state.query + dy, 0, data.queries.length - 1),
    key: clamp(state.key === null ? Math.min(state.query, data.keys.length - 1) : state.key + dx, 0, data.keys.length - 1),
  })));
  const tab = () => {
    tabs.forEach((one, i) => { one.setAttribute("aria-selected", String(names[i] === state.view)); one.tabIndex = names[i] === state.view ? 0 : -1; });
    byId("shade-label").style.visibility = state.view === "weights" ? "visible" : "hidden";
  };
  follow("view", tab);
  follow("layer head view shade theme size", () => { drawHead(); drawMap(); });
  follow("query key pointed", drawOver);
  follow("layer head query key pointed", drawCell);
  follow("layer head query key", drawReads);
  tab();
}
