// What each layer would say: the lens, and the next token, which is its last row.

function opened(row, position, more) {
  const at = position * row.k, ids = numbers(row.ids), probs = numbers(row.probs), logits = numbers(row.logits);
  const rows = Array.from({ length: row.k }, (_, i) => {
    const id = ids[at + i], word = data.lens.words[id];
    return rowOf([num(String(i + 1)), num(String(id)), token([id, word]), ...(more ? [num(shown(logits[at + i]))] : []), num(percent(probs[at + i])), share(probs[at + i])]);
  });
  return table([num("", "th"), num("id", "th"), "token", ...(more ? [num("logit", "th")] : []), num("prob", "th"), ""], rows, { class: "list" });
}

const stands = () => (data.lens?.fills ? "Stands for " : "Next after ");
// Where an encoder's text is looked at, the decoder's last position is meant.
const lensAt = () => (data.attention === "encoder" ? data.text.length - 1 : state.query);

function drawNext() {
  if (!data.lens) { byId("next").hidden = byId("lens").hidden = true; return; }
  fill("next-title", stands(), named(data.text, lensAt()));
  fill("best", opened(data.lens.rows.at(-1), lensAt(), true));
}

function drawLens() {
  if (!data.lens) return;
  const rem = parseFloat(getComputedStyle(document.documentElement).fontSize), position = lensAt(), T = data.text.length;
  const columns = clamp(Math.floor((byId("layers").clientWidth / rem - 5.4) / 5.2), 2, T);
  const first = clamp(position - Math.floor(columns / 2), 0, T - columns), last = first + columns - 1;
  const { rows } = data.lens, row = state.lens ?? rows.length - 1;
  const cell = (layer, at) => {
    const { ids, probs, k } = rows[layer], id = numbers(ids)[at * k], prob = numbers(probs)[at * k], word = token([id, data.lens.words[id]]);
    const color = palette.one[clamp(Math.round(255 * (Number.isFinite(prob) ? prob : 0)), 0, 255)], chosen = layer === row && at === position;
    const button = el("button", { type: "button", tabindex: chosen ? 0 : -1, onclick: () => open(layer, at), "aria-label": `${rows[layer].name}, position ${at}: ${data.lens.words[id] || id}, ${percent(prob)}` }, word, el("small", {}, percent(prob)));
    button.style.background = css(color);
    button.style.color = inkOn(color);
    return el("td", { role: "gridcell", "aria-selected": String(chosen) }, button);
  };
  const places = Array.from({ length: columns }, (_, i) => first + i);
  const head = rowOf([el("th", { class: "l" }), ...places.map((at) => el("th", { scope: "col", class: at === position ? "column" : "" }, el("small", {}, String(at)), token(data.text[at])))], { role: "row" }, "th");
  const body = rows.map((told, layer) => rowOf([el("th", { scope: "row", class: "l" }, told.name), ...places.map((at) => cell(layer, at))], { role: "row" })).reverse();
  const grid = el("table", { class: "lens", role: "grid", "aria-label": "Best token by layer and position" }, el("thead", {}, head), el("tbody", {}, ...body));
  const focused = byId("layers").contains(document.activeElement);
  const open = (layer, at) => {
    choose({ lens: layer, ...(data.attention === "encoder" ? {} : { query: at }) });
    byId("layers").querySelector("[aria-selected=true] button").focus();
  };
  grid.addEventListener("keydown", arrows((dx, dy) => open(clamp(row - dy, 0, rows.length - 1), clamp(position + dx, 0, T - 1))));
  fill("layers", grid);
  if (focused) grid.querySelector("[aria-selected=true] button")?.focus();
  const part = columns < T ? ` Positions ${first} to ${last} of ${T}; the window goes with the query.` : "";
  byId("lens-about").textContent = `Each layer's vector read by the final norm and the head: its best token and probability. The last layer stands on top and is the model's own.${part}`;
  fill("opened", el("p", { class: "dim" }, `${rows[row].name} (${rows[row].path}) · position `, named(data.text, position)), opened(rows[row], position, false));
}

function startLens() {
  follow("query", drawNext);
  follow("query lens theme size", drawLens);
  drawNext();
}
