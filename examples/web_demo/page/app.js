// Draw a character, say what it is, and the network in this page learns it.
import { TrainingPackage, TrainingSession } from 'odtpack';

const SIZE = 28;
const PIXELS = SIZE * SIZE;
const BATCH = 32;
const RATE = 0.002;
const STEPS_PER_DRAWING = 80;
const CLASSES = '0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ';

const $ = (id) => document.getElementById(id);
const pad = $('pad');
const brush = pad.getContext('2d', { willReadFrequently: true });
const examples = []; // {pixels, label, tile, mark}
const losses = [];
const taught = []; // numbers of steps after which a drawing was added
let ort; // of the build that trains here
let session;
let stock; // {pixels, label} of the factory's digits, so that they are not forgotten
let stepsLeft = 0;
let paused = false;
let training = false;
let drawn = false;
let reading = 0; // strokes that the network has not seen yet
let turn = Promise.resolve();

/** One use of the network at a time, in the order of asking. */
function alone(work) {
  turn = turn.then(work, work);
  return turn;
}

async function load() {
  const adapter = await navigator.gpu?.requestAdapter().catch(() => null);
  let where;
  let problem = 'there is no WebGPU in this browser';
  if (adapter) {
    const { description, architecture, vendor } = adapter.info;
    where = `with WebGPU on ${description || architecture || vendor || 'this device'}`;
    // At level 2 ONNX Runtime says that shapes stay on the processor.
    const options = { executionProviders: ['webgpu'], loss: 'every', logSeverityLevel: 3 };
    await open('webgpu', './package-webgpu/', options).catch(({ what, message }) => {
      problem = `WebGPU is refused: ${(what ?? message).replace(/\.$/, '')}`;
    });
  }
  if (!session) {
    await open('wasm', './package/');
    where = `in WebAssembly on ${ort.env.wasm.numThreads} thread(s), as ${problem}`;
  }
  session.setLearningRate(RATE);
  const rows = new Uint8Array(await (await fetch('digits.bin')).arrayBuffer());
  stock = Array.from({ length: rows.length / (PIXELS + 1) }, (_, i) => {
    const row = rows.subarray(i * (PIXELS + 1), (i + 1) * (PIXELS + 1));
    return { label: row[0], pixels: Float32Array.from(row.subarray(1), (value) => value / 255) };
  });
  const count = (await session.getParametersSize()).toLocaleString('en');
  status(`${count} parameters, ready.`);
  $('where').textContent = `It trains ${where}.`;
  for (const id of ['pause', 'download', 'reset']) $(id).disabled = false;
  memory().catch(() => undefined);
  document.body.dataset.ready = 'true';
}

/** Open a session with one of the builds of ONNX Runtime. */
async function open(build, folder, options = {}) {
  ort = await import(`./modules/ort/ort.${build}.min.mjs`);
  ort.env.wasm.wasmPaths = new URL('./modules/ort/', location.href).href;
  ort.env.wasm.numThreads = crossOriginIsolated ? Math.min(2, navigator.hardwareConcurrency) : 1;
  const opened = await TrainingPackage.open(new URL(folder, location.href));
  session = await TrainingSession.create({ package: opened }, { ort, ...options });
}

// ---- Drawing

const ink = () => getComputedStyle(pad).color;

function place(event) {
  const box = pad.getBoundingClientRect();
  const scale = pad.width / box.width; // the pad is square
  return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
}

let last;
pad.addEventListener('pointerdown', (event) => {
  pad.setPointerCapture(event.pointerId);
  last = place(event);
  stroke(last);
});
pad.addEventListener('pointermove', (event) => {
  if (last) for (const each of event.getCoalescedEvents?.() ?? [event]) stroke(place(each));
});
for (const name of ['pointerup', 'pointercancel']) {
  pad.addEventListener(name, () => {
    if (last) {
      document.body.dataset.reading = ++reading;
      alone(guess).then(() => --reading || delete document.body.dataset.reading);
    }
    last = undefined;
  });
}

function stroke(to) {
  Object.assign(brush, { lineWidth: 22, lineCap: 'round', lineJoin: 'round', strokeStyle: ink() });
  brush.beginPath();
  brush.moveTo(...last);
  brush.lineTo(...to);
  brush.stroke();
  last = to;
  drawn = true;
  $('hint').hidden = true;
}

function clear() {
  brush.clearRect(0, 0, pad.width, pad.height);
  drawn = false;
  $('hint').hidden = false;
  $('guess').textContent = '\u00a0';
  for (const key of $('keys').children) key.style.removeProperty('--share');
}

/** The drawing as the network was taught to see: 20 pixels high or wide, in the middle of 28. */
function scaled() {
  const { data } = brush.getImageData(0, 0, pad.width, pad.height);
  let [left, top, right, bottom] = [pad.width, pad.height, 0, 0];
  for (let y = 0; y < pad.height; y++) {
    for (let x = 0; x < pad.width; x++) {
      if (data[(y * pad.width + x) * 4 + 3] < 40) continue;
      left = Math.min(left, x);
      right = Math.max(right, x + 1);
      top = Math.min(top, y);
      bottom = Math.max(bottom, y + 1);
    }
  }
  const [width, height] = [right - left, bottom - top];
  const scale = 20 / Math.max(width, height);
  const small = new OffscreenCanvas(SIZE, SIZE).getContext('2d');
  small.imageSmoothingQuality = 'high';
  small.drawImage(pad, left, top, width, height,
    (SIZE - width * scale) / 2, (SIZE - height * scale) / 2, width * scale, height * scale);
  const alpha = small.getImageData(0, 0, SIZE, SIZE).data;
  return Float32Array.from({ length: PIXELS }, (_, i) => alpha[4 * i + 3] / 255);
}

// ---- The network

function images(pixels) {
  return new ort.Tensor('float32', pixels, [pixels.length / PIXELS, 1, SIZE, SIZE]);
}

function shares(scores) {
  const largest = Math.max(...scores);
  const powers = Array.from(scores, (score) => Math.exp(score - largest));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((power) => power / sum);
}

async function guess() {
  if (!session || !drawn) return;
  const { output } = await session.predict({ input: images(scaled()) });
  const found = shares(output.data);
  found.forEach((share, i) => $('keys').children[i].style.setProperty('--share', share.toFixed(3)));
  const [best, second] = found.map((share, i) => [share, i]).sort(([a], [b]) => b - a);
  $('guess').innerHTML = `It reads <b>${CLASSES[best[1]]}</b> (${Math.round(best[0] * 100)} %)` +
    `, or ${CLASSES[second[1]]}. What is it?`;
}

function teach(label) {
  if (!session || !drawn) return;
  const pixels = scaled();
  const tile = document.createElement('li');
  tile.className = 'example';
  const picture = document.createElement('canvas');
  picture.width = picture.height = SIZE;
  const image = picture.getContext('2d').createImageData(SIZE, SIZE);
  const [r, g, b] = ink().match(/[\d.]+/g).map(Number);
  pixels.forEach((value, i) => image.data.set([r, g, b, value * 255], 4 * i));
  picture.getContext('2d').putImageData(image, 0, 0);
  const mark = document.createElement('span');
  tile.append(picture, mark);
  if (!examples.length) $('examples').replaceChildren();
  $('examples').prepend(tile);
  examples.push({ pixels, label, tile, mark });
  clear();
  taught.push(losses.length);
  stepsLeft = STEPS_PER_DRAWING;
  alone(judge);
  learn();
}

/** A drawing moved, turned and scaled a little: as it might have been drawn the next time. */
function varied(pixels) {
  const angle = (Math.random() - 0.5) * 0.35;
  const scale = 1 + (Math.random() - 0.5) * 0.25;
  const [cos, sin] = [Math.cos(angle) / scale, Math.sin(angle) / scale];
  const [dx, dy] = [(Math.random() - 0.5) * 4, (Math.random() - 0.5) * 4];
  const center = (SIZE - 1) / 2;
  const at = (x, y) => (x < 0 || y < 0 || x >= SIZE || y >= SIZE ? 0 : pixels[y * SIZE + x]);
  return Float32Array.from({ length: PIXELS }, (_, i) => {
    const [x, y] = [(i % SIZE) - center - dx, Math.floor(i / SIZE) - center - dy];
    const [u, v] = [cos * x + sin * y + center, cos * y - sin * x + center];
    const [left, top] = [Math.floor(u), Math.floor(v)];
    const [a, b] = [u - left, v - top];
    return (1 - a) * (1 - b) * at(left, top) + a * (1 - b) * at(left + 1, top) +
      (1 - a) * b * at(left, top + 1) + a * b * at(left + 1, top + 1);
  });
}

function batch() {
  const pixels = new Float32Array(BATCH * PIXELS);
  const labels = new BigInt64Array(BATCH);
  for (let i = 0; i < BATCH; i++) {
    const from = i % 3 ? examples : stock; // a third are stock digits
    const chosen = from[Math.floor(Math.random() * from.length)];
    pixels.set(varied(chosen.pixels), i * PIXELS);
    labels[i] = BigInt(chosen.label);
  }
  return { input: images(pixels), labels: new ort.Tensor('int64', labels, [BATCH]) };
}

async function learn() {
  if (training || paused || !examples.length) return;
  training = true;
  document.body.dataset.learning = 'true';
  while (stepsLeft > 0 && !paused) {
    await alone(step);
    if (losses.length % 8 === 0) await alone(judge);
    await new Promise((resolve) => setTimeout(resolve)); // strokes and clicks come first
  }
  await alone(judge);
  memory().catch(() => undefined);
  training = false;
  delete document.body.dataset.learning;
  status(paused ? 'Paused.' : 'Learned. Draw another one, or the same one again.');
}

async function step() {
  const start = performance.now();
  losses.push(await session.trainBatch(batch()));
  stepsLeft -= 1;
  status('Learning …');
  $('speed').textContent = `${(performance.now() - start).toFixed(0)} ms`;
  $('steps').textContent = session.stepCount;
  draw();
}

/** Read all drawings with the network of now. */
async function judge() {
  if (!examples.length) return;
  const pixels = new Float32Array(examples.length * PIXELS);
  examples.forEach((example, i) => pixels.set(example.pixels, i * PIXELS));
  const { output } = await session.predict({ input: images(pixels) });
  let right = 0;
  examples.forEach(({ label, tile, mark }, i) => {
    const scores = output.data.subarray(i * CLASSES.length, (i + 1) * CLASSES.length);
    const best = scores.indexOf(Math.max(...scores));
    tile.classList.toggle('right', best === label);
    const said = CLASSES[label];
    mark.textContent = best === label ? said : `${said}, reads ${CLASSES[best]}`;
    right += best === label;
  });
  const share = Math.round((right / examples.length) * 100);
  $('accuracy').textContent = `${share} % of ${examples.length}`;
}

/** What the training holds (parameters, gradients, moments), and the whole page once measured. */
async function memory() {
  const parameters = [...session.state.parameters.values()];
  const arrays = parameters.flatMap(({ data, grad }) => [data, grad ?? []]);
  const moments = [...session.state.optimizer.moments.values()].flat().map(({ data }) => data);
  const state = [...arrays, ...moments].reduce((sum, { byteLength = 0 }) => sum + byteLength, 0);
  $('memory').textContent = megabytes(state);
  $('page-memory').textContent = performance.measureUserAgentSpecificMemory && crossOriginIsolated
    ? megabytes((await performance.measureUserAgentSpecificMemory()).bytes)
    : 'not told';
}

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

// ---- The page

function status(text) {
  $('status').textContent = text;
}

function draw() {
  const shown = losses.slice(-400);
  let mean = shown[0];
  const smooth = shown.map((loss) => (mean += 0.12 * (loss - mean)));
  const top = Math.max(...shown, 0.5);
  const across = (i) => ((i / Math.max(shown.length - 1, 1)) * 560).toFixed(1);
  const down = (value) => (212 - (value / top) * 204).toFixed(1);
  const points = (values) => values.map((value, i) => `${across(i)},${down(value)}`).join(' ');
  $('raw').setAttribute('points', points(shown));
  $('smooth').setAttribute('points', points(smooth));
  const first = losses.length - shown.length;
  $('taught').setAttribute('d', taught.filter((at) => at > first)
    .map((at) => `M${across(at - first)} 8V212`).join(''));
  $('loss').textContent = mean.toFixed(3);
}

for (const [i, character] of [...CLASSES].entries()) {
  const key = document.createElement('button');
  key.type = 'button';
  key.textContent = character;
  key.setAttribute('aria-label', `It is ${character}`);
  key.addEventListener('click', () => teach(i));
  $('keys').append(key);
}
addEventListener('keydown', (event) => {
  const label = CLASSES.indexOf(event.key.toUpperCase());
  if (event.key.length === 1 && label >= 0 && !event.ctrlKey && !event.metaKey) teach(label);
  if (event.key === 'Escape') clear();
});
$('grid').innerHTML += [8, 59, 110, 161, 212]
  .map((y) => `<line x1="0" x2="560" y1="${y}" y2="${y}"></line>`).join('');
$('clear').addEventListener('click', clear);
$('pause').addEventListener('click', () => {
  paused = !paused;
  $('pause').textContent = paused ? 'Go on' : 'Pause';
  if (!paused) {
    stepsLeft = Math.max(stepsLeft, STEPS_PER_DRAWING);
    learn();
  }
});
$('download').addEventListener('click', () => alone(async () => {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(await session.state.toBlob(true));
  link.download = 'trained.ckpt';
  link.click();
  URL.revokeObjectURL(link.href);
}));
$('reset').addEventListener('click', () => location.reload());
load().catch((error) => status(error.message));
