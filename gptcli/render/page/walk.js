// The walk through the chosen head at the chosen query, and where each of its numbers comes from.

const FEW = 8; // numbers of a vector that are shown of a longer one
const open = { walk: null, whole: new Set(), origin: null };

const stepsOf = (walk) => [...walk.before, ...walk.after].map(([recipe, place, mean, norm]) => {
  const [path, label, formula] = data.recipes[recipe];
  return { path, label, formula, values: numbers(place), mean, norm };
});

// A number that opens; key: what it is, so that it can be found again.
function opener(text, key, tell) {
  return el("button", { type: "button", class: `x${open.origin === key ? " on" : ""}`, tabindex: -1, "data-key": key, onclick: () => openOrigin(key, tell) }, text);
}

function vector(values, key, tell) {
  const whole = values.length <= FEW || open.whole.has(key), kept = whole ? values.length : FEW - 2;
  const made = el("span", { class: "vector" }, ...Array.from({ length: kept }, (_, i) => opener(shown(values[i]), `${key}[${i}]`, () => tell(i))));
  if (values.length > FEW)
    made.append(el("button", { type: "button", class: "more x", tabindex: -1, "data-key": `${key}…`, onclick: () => { whole ? open.whole.delete(key) : open.whole.add(key); drawWalk(`${key}…`); } }, whole ? "fewer" : `… ${values.length - kept} more`));
  return made;
}

function drawWalk(focus) {
  const { layer, head, query } = state, walk = walkOf(layer, head, query);
  fill("walk-title", `Walk · L${layer}H${head} · query `, named(data.queries, query));
  if (walk !== open.walk) { open.walk = walk; open.whole.clear(); closeOrigin(); }
  if (!walk) {
    const here = [...new Set(data.walks.map((told) => nameOf(told.layer, told.head)))];
    byId("walk-about").textContent = "";
    const held = data.walks.length ? ` This file holds walks of ${here.slice(0, 6).join(", ")}${here.length > 6 ? " …" : ""}${data.walks.length === 1 ? ` at query ${data.walks[0].position}` : ""}.` : "";
    const jump = data.walks[0];
    fill("steps", el("div", { class: "missing" }, "The walk through this head at this query is not in this file", ...(data.replayed && !data.walks.length ? [", for the trace's file doesn't hold its layer whole."] : [": add ",
      el("code", {}, `--layer ${layer + 1} --head ${head} --position ${query}${data.attention === "self" ? "" : ` --attention ${data.attention}`}`), ` to the command.${held} `]),
      jump ? el("button", { type: "button", onclick: () => choose({ layer: jump.layer, head: jump.head, query: jump.position }) }, `Go to L${jump.layer}H${jump.head}, query ${jump.position}`) : null));
    return;
  }
  byId("walk-about").textContent = ["Every number opens: click it, or go to it by the arrows and press Enter.", ...walk.edited.map((edit) => `Edited ${edit}.`)].join(" ");
  const steps = stepsOf(walk), cut = walk.before.length, zAt = steps.findIndex((step) => step.label.endsWith(".z"));
  const line = (step, i) => el("div", { class: "step" },
    el("span", { class: "tok", title: step.path }, step.label),
    vector(step.values, step.label, (c) => (i === zAt ? originOfZ(walk, steps, c) : originOfStep(steps, i, c))),
    el("span", { class: "dim" }, step.values.length > FEW ? `[${step.values.length}] mean ${shown(step.mean)} norm ${shown(step.norm)} · ${step.formula}` : step.formula));
  const list = (from, to) => el("div", { class: "steps" }, ...steps.slice(from, to).map((step, i) => line(step, from + i)));
  fill("steps", list(0, cut), el("div", { class: "wide" }, keysTable(walk, steps[zAt])), list(cut));
  const every = [...byId("steps").querySelectorAll(".x")], at = every.find((x) => x.dataset.key === focus) ?? every.find((x) => x.dataset.key === open.origin) ?? every[0];
  at.tabIndex = 0;
  if (focus) at.focus();
}

function keysTable(walk, z) {
  const D = z.values.length, short = D <= 4, columns = {};
  for (const name of ["k", "v", "weighted", "product", "scaled", "weight", "normK", "normWeighted", "visible"]) columns[name] = numbers(walk[name]);
  const bias = walk.bias && numbers(walk.bias), S = data.keys.length, whole = open.whole.has("keys");
  const kept = whole ? data.keys.map((_, i) => i) : walk.heaviest;
  const part = (name, j) => columns[name].subarray(j * D, (j + 1) * D);
  const row = (j) => rowOf([
    named(data.keys, j),
    el("td", { class: "n" }, short ? vector(part("k", j), `k${j}`, () => originOfK(walk, j)) : opener(shown(columns.normK[j]), `k${j}`, () => originOfK(walk, j))),
    el("td", { class: "n" }, opener(shown(columns.product[j]), `qk${j}`, () => originOfProduct(walk, j))),
    ...(bias ? [num(shown(bias[j]))] : []),
    el("td", { class: "n" }, opener(shown(columns.scaled[j]), `s${j}`, () => originOfScore(walk, j))),
    num(columns.visible[j] ? "0" : "−∞"),
    el("td", { class: "n" }, opener(shown(columns.weight[j]), `w${j}`, () => originOfWeight(walk, j))),
    el("td", { class: "n" }, short ? vector(part("weighted", j), `wv${j}`, () => originOfWeighted(walk, j)) : opener(shown(columns.normWeighted[j]), `wv${j}`, () => originOfWeighted(walk, j))),
  ], { class: j === state.key ? "chosen" : "" });
  const rows = kept.map(row), gap = 4 + (bias ? 1 : 0);
  const wide = (cells) => rowOf(cells, { class: "sum" });
  if (kept.length < S || whole) {
    const toggle = el("button", { type: "button", class: "more x", tabindex: -1, "data-key": "keys…", onclick: () => { whole ? open.whole.delete("keys") : open.whole.add("keys"); drawWalk("keys…"); } }, whole ? "only the heaviest" : `… ${S - kept.length} keys more`);
    rows.push(wide([toggle, ...Array(gap + 2).fill("")]));
  }
  if (walk.sink !== null) rows.push(wide(["sink", ...Array(gap).fill(""), num(shown(walk.sink)), ""]));
  rows.push(wide(["sum", ...Array(gap).fill(""), num(shown(walk.weights)), num("= z")]));
  return table(["key", num(short ? "k" : "|k|", "th"), num("q·k", "th"), ...(bias ? [num("+ bias", "th")] : []), num("score", "th"), num("mask", "th"), num("weight", "th"), num(short ? "weight·v" : "|weight·v|", "th")], rows, {}, `score = ${walk.score}`);
}

// Origins. Each returns a title and what stands below it.

const say = (...told) => el("p", {}, ...told);
const n = (x) => el("span", { class: "num" }, shown(x));
const link = (text, key, tell) => el("button", { type: "button", class: "x", onclick: () => openOrigin(key, tell) }, text);

function openOrigin(key, tell) {
  open.origin = key;
  const [title, ...told] = tell();
  fill("origin", el("h3", {}, title, el("button", { type: "button", class: "more", "aria-label": "Close", onclick: () => closeOrigin(true) }, "Esc")), ...told);
  const inside = byId("steps").querySelectorAll(".x");
  inside.forEach((x) => { const on = x.dataset.key === key; x.classList.toggle("on", on); x.tabIndex = on ? 0 : -1; });
  if (![...inside].some((x) => x.tabIndex === 0) && inside.length) inside[0].tabIndex = 0;
}

function closeOrigin(back) {
  const was = [...byId("steps").querySelectorAll(".x")].find((x) => x.dataset.key === open.origin);
  open.origin = null;
  fill("origin");
  byId("steps").querySelectorAll(".x.on").forEach((x) => x.classList.remove("on"));
  if (back && was) was.focus();
}

const componentRows = (head, rows) => el("div", { class: "wide" }, table(head, rows));
const key = (j) => el("span", {}, "key ", named(data.keys, j));

function originOfK(walk, j) {
  const D = numbers(walk.q).length, k = numbers(walk.k).subarray(j * D, (j + 1) * D);
  return [el("span", {}, "k of ", key(j)), say("as the query meets it: this key/value head's k at that position, all ", String(D), " numbers; its norm is ", n(numbers(walk.normK)[j]), "."),
    componentRows([num("", "th"), num("k", "th")], Array.from(k, (x, i) => rowOf([num(String(i)), num(shown(x))])))];
}

function originOfProduct(walk, j) {
  const q = numbers(walk.q), D = q.length, at = (name) => numbers(walk[name]).subarray(j * D, (j + 1) * D), k = at("k"), terms = at("terms");
  return [el("span", {}, "q·k with ", key(j)), say("q times k, number by number, and their sum."),
    componentRows([num("", "th"), num("q", "th"), num("k", "th"), num("q × k", "th")],
      [...Array.from(q, (x, i) => rowOf([num(String(i)), num(shown(x)), num(shown(k[i])), num(shown(terms[i]))])), rowOf(["", "", num("q·k"), num(shown(numbers(walk.product)[j]))], { class: "sum" })])];
}

function originOfScore(walk, j) {
  const product = numbers(walk.product)[j], score = numbers(walk.scaled)[j];
  return [el("span", {}, "score of ", key(j)), say(`score = ${walk.score}`),
    say("q·k is ", link(shown(product), `qk${j}`, () => originOfProduct(walk, j)), " and the scale ", n(walk.scale),
      ...(walk.softcap ? [", capped by tanh at ", n(walk.softcap)] : []), ...(walk.bias ? [", and its distance adds ", n(numbers(walk.bias)[j])] : []), ": ", n(score), "."),
    say(numbers(walk.visible)[j] ? "The mask lets it through." : "The mask hides this key: behind it the score is −∞.")];
}

function originOfWeight(walk, j) {
  const score = numbers(walk.scaled), parts = numbers(walk.parts), weight = numbers(walk.weight), seen = numbers(walk.visible);
  const title = el("span", {}, "weight of ", key(j));
  if (!seen[j]) return [title, say("The mask hides this key: its score becomes −∞, and e to that is 0. Its weight is ", n(weight[j]), ".")];
  const count = seen.reduce((sum, x) => sum + x, 0);
  const rows = walk.heaviest.filter((i) => seen[i]).map((i) => rowOf([named(data.keys, i), num(shown(score[i])), num(shown(parts[i])), num(shown(weight[i]))], { class: i === j ? "chosen" : "" }));
  return [title,
    say("The softmax: e to the score, less the highest score, over the sum of these."),
    say("score ", link(shown(score[j]), `s${j}`, () => originOfScore(walk, j)), " from q·k ", link(shown(numbers(walk.product)[j]), `qk${j}`, () => originOfProduct(walk, j))),
    say("e^(", n(score[j]), " − ", n(walk.highest), ") = ", n(parts[j])),
    say(`sum over ${count} key${count === 1 ? "" : "s"}${walk.sink === null ? "" : " and the sink"} = `, n(walk.total)),
    say(n(parts[j]), " / ", n(walk.total), " = ", n(weight[j])),
    componentRows(["key", num("score", "th"), num("e^(…)", "th"), num("weight", "th")], rows), rows.length < count ? say(`the heaviest ${rows.length} of ${count} keys`) : null];
}

function originOfWeighted(walk, j) {
  const D = numbers(walk.q).length, at = (name) => numbers(walk[name]).subarray(j * D, (j + 1) * D), v = at("v"), weighted = at("weighted"), weight = numbers(walk.weight)[j];
  return [el("span", {}, "weight·v of ", key(j)), say("weight ", link(shown(weight), `w${j}`, () => originOfWeight(walk, j)), " times v, number by number; the norm is ", n(numbers(walk.normWeighted)[j]), "."),
    componentRows([num("", "th"), num("v", "th"), num("weight × v", "th")], Array.from(v, (x, i) => rowOf([num(String(i)), num(shown(x)), num(shown(weighted[i]))])))];
}

function originOfZ(walk, steps, c) {
  const D = numbers(walk.q).length, weight = numbers(walk.weight), v = numbers(walk.v), weighted = numbers(walk.weighted), z = steps.find((step) => step.label.endsWith(".z"));
  const rows = walk.heaviest.map((j) => rowOf([named(data.keys, j), el("td", { class: "n" }, link(shown(weight[j]), `w${j}`, () => originOfWeight(walk, j))), num(shown(v[j * D + c])), num(shown(weighted[j * D + c]))]));
  const rest = data.keys.length - rows.length;
  return [`${z.label}[${c}]`, say(`Of every key the weight times v[${c}], and their sum.`),
    componentRows(["key", num("weight", "th"), num(`v[${c}]`, "th"), num("product", "th")],
      [...rows, ...(rest ? [rowOf([`… ${rest} keys more`, "", "", ""], { class: "sum" })] : []), rowOf(["", "", num("sum"), num(shown(z.values[c]))], { class: "sum" })])];
}

function originOfStep(steps, at, c) {
  const step = steps[at], label = `${step.label}[${c}]`;
  // What the formula names and the walk holds: of a sum or a product number by number, of a matrix the whole vector.
  const used = steps.filter((other) => other !== step && new RegExp(`(^|[^\\w.])${other.label.replace(".", "\\.")}(?![\\w.])`).test(step.formula));
  const whole = /·W|x\/√|\(x-mean/.test(step.formula), told = [];
  if (step.label === "merged") {
    const z = steps.find((other) => other.label.endsWith(".z")), D = z.values.length;
    told.push(say(`number ${c % D} of head ${Math.floor(c / D)}'s z`));
  }
  for (const other of used)
    told.push(whole || other.values.length !== step.values.length
      ? say(`${other.label}: all ${other.values.length} numbers, norm `, n(other.norm))
      : say(`${other.label}[${c}] = `, n(other.values[c])));
  return [label, say(`${step.label} = ${step.formula}`), ...(/·W/.test(step.formula) ? [say(`number ${c} takes one column of that matrix`)] : []), ...told, say(`${label} = `, n(step.values[c]))];
}

function startWalk() {
  byId("steps").addEventListener("keydown", arrows((dx, dy) => {
    const every = [...byId("steps").querySelectorAll(".x")], from = every.indexOf(document.activeElement);
    if (from < 0) return;
    let to = from + dx;
    if (dy) {
      const box = every[from].getBoundingClientRect(), middle = (b) => b.left + b.width / 2;
      const boxes = every.map((x) => x.getBoundingClientRect());
      const lines = boxes.map((b, i) => [b, i]).filter(([b]) => (dy > 0 ? b.top > box.top + 4 : b.top < box.top - 4));
      if (!lines.length) return;
      const edge = dy > 0 ? Math.min(...lines.map(([b]) => b.top)) : Math.max(...lines.map(([b]) => b.top));
      to = lines.filter(([b]) => Math.abs(b.top - edge) < 4).sort(([a], [b]) => Math.abs(middle(a) - middle(box)) - Math.abs(middle(b) - middle(box)))[0][1];
    }
    to = clamp(to, 0, every.length - 1);
    every[from].tabIndex = -1;
    every[to].tabIndex = 0;
    every[to].focus();
  }));
  follow("layer head query key", () => drawWalk());
}
