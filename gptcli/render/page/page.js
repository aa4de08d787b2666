// Everything together.

function drawHeader() {
  const { model } = data;
  fill("model", model.name, " ", el("span", { class: "dim" }, `(${model.source}${model.weights === "hand-written" ? ", hand-written weights" : ""})`));
  document.title = `${model.name} · gptcli trace`;
  const loud = [...(model.seed === null ? [] : [`RANDOM WEIGHTS (seed ${model.seed})`]), ...model.edits.map((edit) => `EDITED ${edit}`), ...data.findings];
  const kind = { self: "attention to its own text", cross: "attention across to the source", encoder: "the source's own attention" }[data.attention];
  fill("facts", [`${model.parameters} parameters`, model.dtype, model.device, `${data.queries.length} queries, ${data.keys.length} keys`, kind].filter(Boolean).join(" · "), ...loud.flatMap((said) => [" · ", el("span", { class: "loud" }, said)]));
}

function drawSaid() {
  fill("holds", ...data.said.map((line) => el("li", {}, line)));
  const failed = data.proof.filter(([, , , ok]) => !ok).length, said = (x) => (typeof x === "string" ? x : x.toExponential(1));
  fill("proof", el("summary", { class: failed ? "loud" : "" }, failed ? `Proof FAILED: ${failed} of ${data.proof.length} claims` : `Proof ok: ${data.proof.length} claims hold`),
    el("ul", {}, ...data.proof.map(([claim, error, allowed, ok]) => el("li", { class: ok ? "" : "loud" }, `${ok ? "ok" : "FAILED"}: ${claim}, ${error === 0 ? "exactly" : `off by ${said(error)}, ${said(allowed)} allowed`}`))));
  byId("proof").open = failed > 0;
}

const redraw = (name) => listeners.filter((one) => one.names.includes(name)).forEach((one) => one.draw());

async function start() {
  drawHeader();
  await unpack();
  openHeads();
  openWalks();
  document.querySelector("main").hidden = false;
  byId("wait").remove();
  readPalette();
  if (!current()) Object.assign(state, { layer: data.heads[0].layer, head: data.heads[0].head });
  drawText();
  drawPicker();
  startMap();
  startLens();
  startWalk();
  drawSaid();
  redraw("theme");
  drawCell();
  drawReads();
  drawWalk();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readPalette(); redraw("theme"); });
  let waiting = 0;
  window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => redraw("size")); });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (open.origin !== null) return closeOrigin(true);
    choose({ key: null });
    point({});
  });
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  const said = `The numbers of this page can't be unpacked here (${error.message}). It needs a browser of 2023 or later.`;
  byId("wait") ? (byId("wait").textContent = said) : byId("facts").append(said);
  throw error;
});
