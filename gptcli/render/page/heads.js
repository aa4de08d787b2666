// The text's tokens, and a small map of every head to choose by.

function tokenFacts(list, position, what) {
  const [id, , bytes, added] = list[position];
  return [`${what} `, named(list, position), ` · id ${id}`, bytes ? ` · bytes ${bytes}` : " · its bytes are not known", added ? " · added by the tokenizer's rule" : ""];
}

function strip(list, label, selects) {
  const chips = list.map((told, i) =>
    el("div", { role: "option", class: told[3] ? "added" : "", "aria-selected": "false", tabindex: -1 }, el("small", {}, String(i)), token(told)));
  const goal = (i) => (selects ? { query: i, key: data.attention === "cross" ? undefined : i } : { key: i });
  const box = el("div", { role: "listbox", "aria-label": label, class: "tokens", "aria-orientation": "horizontal" }, ...chips);
  let at = 0;
  const focus = (i) => {
    chips[at].tabIndex = -1;
    at = clamp(i, 0, chips.length - 1);
    chips[at].tabIndex = 0;
    return chips[at];
  };
  chips.forEach((chip, i) => {
    chip.addEventListener("pointerenter", () => point(goal(i)));
    chip.addEventListener("pointerleave", () => point({}));
    chip.addEventListener("focus", () => point(goal(i)));
    chip.addEventListener("click", () => { focus(i); choose(selects ? { query: i } : { key: i }); });
  });
  box.addEventListener("focusout", () => point({}));
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(selects ? { query: at } : { key: at }); }
  });
  box.addEventListener("keydown", arrows((dx, dy) => {
    const chip = chips[at], rows = chips.filter((other) => dy && Math.sign(other.offsetTop - chip.offsetTop) === Math.sign(dy));
    const top = rows.length && (dy > 0 ? rows[0] : rows.at(-1)).offsetTop;
    const near = rows.filter((other) => other.offsetTop === top).sort((a, b) => Math.abs(a.offsetLeft - chip.offsetLeft) - Math.abs(b.offsetLeft - chip.offsetLeft))[0];
    const to = clamp(near ? chips.indexOf(near) : at + (dy || dx), 0, chips.length - 1);
    if (selects) choose({ query: to });
    focus(to).focus();
  }));
  const mark = () => chips.forEach((chip, i) => {
    chip.setAttribute("aria-selected", String(i === (selects ? state.query : state.key)));
    chip.classList.toggle("pointed", i === (selects ? pointed.query : undefined) || i === (selects && data.attention === "cross" ? undefined : pointed.key));
  });
  focus(0);
  follow("query key pointed", mark);
  const reveal = () => {
    const chip = focus(state.query), from = chip.offsetTop;
    if (from < box.scrollTop || from + chip.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = from - box.clientHeight / 2;
  };
  if (selects) { follow("query", reveal); requestAnimationFrame(reveal); }
  mark();
  return box;
}

function drawText() {
  const across = data.attention === "cross";
  fill("tokens", strip(data.queries, "Queries; the selected one is looked into", true));
  byId("tokens").className = "";
  if (across) byId("tokens").append(el("h3", {}, "Source, which is read"), strip(data.keys, "Keys", false));
  if (data.attention === "encoder") byId("text-title").textContent = "Source";
  const tell = () => {
    const { query, key } = pointed;
    if (query !== undefined) fill("token", ...tokenFacts(data.queries, query, "position"));
    else if (key !== undefined) fill("token", ...tokenFacts(data.keys, key, "key"));
    else fill("token", ...tokenFacts(data.queries, state.query, "query"));
  };
  follow("query pointed", tell);
  tell();
}

const SMALL = 24; // cells a side of a small map

function thumbnail(canvas, head) {
  const rows = Math.min(SMALL, head.T), columns = Math.min(SMALL, head.S), most = new Int32Array(rows * columns).fill(-1);
  const { codes, none, at } = head.plane, { first, size, start } = head.held;
  // Of each cell the place of its largest weight: codes rise with what they stand for.
  for (let q = 0; q < head.T; q++) {
    const row = Math.floor((q * rows) / head.T) * columns;
    for (let i = 0; i < size[q]; i++) {
      const cell = row + Math.floor(((first[q] + i) * columns) / head.S), from = start[q] + i;
      if (codes[from] !== none && (most[cell] < 0 || codes[from] > codes[most[cell]])) most[cell] = from;
    }
  }
  const high = most.reduce((top, from) => (from < 0 ? top : Math.max(top, at(from) || 0)), 0) || 1;
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  most.forEach((from, i) => image.data.set(from < 0 ? [0, 0, 0, 0] : [...palette.one[clamp(Math.round(255 * Math.sqrt(Math.max(0, at(from) || 0) / high)), 0, 255)], 255], 4 * i));
  context.putImageData(image, 0, 0);
}

function drawPicker() {
  const number = 1 + Math.max(...data.heads.map((head) => head.head)), cells = new Map();
  const layers = Array.from({ length: data.layers }, (_, i) => i);
  const title = (layer, head) => {
    const one = heads.get(nameOf(layer, head));
    return `Layer ${layer + 1} of ${data.layers}, head ${head} = ${nameOf(layer, head)}${one.kvs < one.heads ? `, key/value head ${one.kv}` : ""}${one.window ? `, window ${one.window}` : ""}`;
  };
  const cell = (layer, head) => {
    if (!heads.has(nameOf(layer, head))) return el("td", { role: "gridcell" });
    const button = el("button", { type: "button", tabindex: -1, "aria-label": title(layer, head), onclick: () => choose({ layer, head }) }, el("canvas", { "aria-hidden": "true", width: 1, height: 1 }));
    button.addEventListener("pointerenter", () => { byId("picked").textContent = title(layer, head); });
    button.addEventListener("pointerleave", () => tell());
    cells.set(nameOf(layer, head), button);
    return el("td", { role: "gridcell", "aria-selected": "false" }, button);
  };
  const rows = layers.map((layer) => rowOf([el("th", { scope: "row" }, String(layer + 1)), ...Array.from({ length: number }, (_, head) => cell(layer, head))], { role: "row" }));
  const headers = rowOf([el("th"), ...Array.from({ length: number }, (_, head) => el("th", { scope: "col" }, String(head)))], { role: "row" }, "th");
  const grid = el("table", { role: "grid", class: "grid", "aria-label": "Every head: rows are layers, columns are heads" }, el("thead", {}, headers), el("tbody", {}, ...rows));
  byId("picker").classList.toggle("few", number <= 4 && data.layers <= 8);
  fill("picker", grid);
  grid.addEventListener("keydown", arrows((dx, dy) => {
    let { layer, head } = state;
    if (Math.abs(dx) > 1 || Math.abs(dy) > 1) {
      head = clamp(head + dx, 0, number - 1);
      layer = clamp(layer + dy, 0, data.layers - 1);
      while (head > 0 && !cells.has(nameOf(layer, head))) head--;
    } else {
      do { layer += dy; head += dx; } while (layer >= 0 && layer < data.layers && head >= 0 && head < number && !cells.has(nameOf(layer, head)));
    }
    if (!cells.has(nameOf(layer, head))) return;
    choose({ layer, head });
    cells.get(nameOf(layer, head)).focus();
  }));
  const tell = () => { byId("picked").textContent = `Rows: layers from 1. Columns: heads from 0. Chosen: ${nameOf(state.layer, state.head)}`; };
  const mark = () => {
    cells.forEach((button, name) => {
      const chosen = name === nameOf(state.layer, state.head);
      button.tabIndex = chosen ? 0 : -1;
      button.parentElement.setAttribute("aria-selected", String(chosen));
    });
    tell();
  };
  follow("layer head", mark);
  follow("theme", () => {
    const waiting = [...cells];
    const some = () => {
      const until = performance.now() + 12;
      while (waiting.length && performance.now() < until) { const [name, button] = waiting.shift(); thumbnail(button.firstChild, heads.get(name)); }
      if (waiting.length) requestAnimationFrame(some);
    };
    some();
  });
  mark();
}
