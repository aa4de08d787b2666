// What the page holds: the report as JSON, and its numbers in one block.

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const KINDS = { f32: Float32Array, i32: Int32Array, u16: Uint16Array, u8: Uint8Array };
let block;

async function unpack() {
  const letters = atob(byId("numbers").textContent.trim());
  const packed = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  block = await new Response(stream).arrayBuffer();
}

const numbers = ([kind, at, count]) => new KINDS[kind](block, at, count);

// A plane's numbers one by one. near: they are codes of 8 bits, close to the run's own.
function plane(told) {
  if (!told) return null;
  const [place, low, step, root, none] = told, codes = numbers(place);
  const value = (code) => (code === none ? NaN : root ? (low + step * code) ** 2 : low + step * code);
  return { near: place[0] === "u8", codes, none, at: place[0] === "f32" ? (i) => codes[i] : (i) => value(codes[i]) };
}

// For each way of seeing: of every query the first key, how many, and where its numbers begin.
function spans(place) {
  const flat = numbers(place), first = [], size = [], start = [];
  for (let i = 0, at = 0; i < flat.length; i += 2) {
    first.push(flat[i]); size.push(flat[i + 1]); start.push(at);
    at += flat[i + 1];
  }
  return { first, size, start };
}

const heads = new Map(); // by name: L0H1
const nameOf = (layer, head) => `L${layer}H${head}`;

function openHeads() {
  const every = data.spans.map(spans), T = data.queries.length, S = data.keys.length;
  for (const told of data.heads) {
    const weights = plane(told.weights), sink = plane(told.sink), products = plane(told.products), scaled = plane(told.scaled);
    const held = every[told.spans], seen = every[told.seen];
    const within = (span, q, k) => k >= span.first[q] && k < span.first[q] + span.size[q];
    heads.set(nameOf(told.layer, told.head), {
      ...told, T, S, held, plane: weights, near: weights.near, nearScores: products?.near,
      masks: seen.size.some((size) => size < S),
      sees: (q, k) => within(seen, q, k),
      weight: (q, k) => (within(held, q, k) ? weights.at(held.start[q] + k - held.first[q]) : 0),
      sinkOf: sink && ((q) => sink.at(q)),
      productOf: products && ((q, k) => products.at(q * S + k)),
      scaledOf: scaled && ((q, k) => scaled.at(q * S + k)),
    });
  }
}

const walks = new Map();
const walkOf = (layer, head, position) => walks.get(`${nameOf(layer, head)}q${position}`);
const openWalks = () => data.walks.forEach((walk) => walks.set(`${nameOf(walk.layer, walk.head)}q${walk.position}`, walk));

// A number as a person reads it; what is none is a word.
function shown(x) {
  if (typeof x === "string") return x;
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  return size === 0 ? "0" : size < 1e-4 || size >= 1e5 ? x.toExponential(2) : x.toFixed(4);
}
const about = (x, near) => (near && Number.isFinite(x) && x !== 0 ? "≈" : "") + shown(x);
const percent = (x) => (Number.isFinite(x) ? `${(100 * x).toFixed(2)} %` : shown(x));
