// Programs for a page of web.py, whose globals are `kit`, `ort` and `memories`. A task is that of
// training.mjs; its package and its batches are served as `/files/package` and `/files/0-input.bin`,
// and `providers` are ONNX Runtime's.
import { runSuite } from './conformance.mjs';
import { hostile, readings } from './reading.mjs';
import { stress } from './sessions.mjs';

const ARRAYS = { float32: Float32Array, int64: BigInt64Array };
const PACKAGE = '/files/package';
const bytesOf = async (path) => new Uint8Array(await (await fetch(path)).arrayBuffer());

async function batchOf(data, number) {
  const batch = {};
  for (const [name, { dtype, shape }] of Object.entries(data)) {
    const { buffer } = await bytesOf(`/files/${number}-${name}.bin`);
    batch[name] = new ort.Tensor(dtype, new ARRAYS[dtype](buffer), shape);
  }
  return batch;
}

const optionsOf = ({ providers }) => ({ ort, ...(providers && { executionProviders: providers }) });

/** Train and save; what becomes of the file, kept and cut. */
export async function train(task) {
  const session = await kit.TrainingSession.create({ package: PACKAGE }, optionsOf(task));
  session.setLearningRate(task.rate);
  const batches = await Promise.all((task.batches ?? [task.data]).map(batchOf));
  const losses = [];
  const held = [];
  for (let step = 0; step < task.steps; step++) {
    if (task.measure?.includes(step)) {
      gc();
      const wasm = memories.reduce((sum, { buffer }) => sum + buffer.byteLength, 0);
      held.push([wasm, performance.memory.usedJSHeapSize]);
    }
    const feeds = batches[step % batches.length];
    losses.push(session.lossOf(await session.runTrainStep(feeds)));
    await session.runOptimizerStep();
    await session.lazyResetGrad();
  }
  const folder = await navigator.storage.getDirectory();
  const file = await folder.getFileHandle('trained.ckpt', { create: true });
  await session.saveCheckpoint(file);
  const before = await folder.getFileHandle('trained.ckpt.previous', { create: true });
  session.state.properties.set('saves', 2);
  await session.saveCheckpoint(file, true, { keepPrevious: before });
  const again = await kit.CheckpointState.load(file, before);
  const { size } = await file.getFile();
  const stream = await file.createWritable({ keepExistingData: true });
  await stream.truncate(size - 1);
  await stream.close();
  const old = await kit.CheckpointState.load(file, before);
  await session.saveCheckpoint(file);
  const bytes = new Uint8Array(await (await file.getFile()).arrayBuffer());
  let text = '';
  for (const byte of bytes) text += String.fromCharCode(byte);
  return { losses, held, threads: ort.env.wasm.numThreads, isolated: crossOriginIsolated,
           saved: btoa(text), step: again.optimizer.step, checked: again.checked,
           recovered: [again.recovered, old.recovered, old.properties.get('saves')],
           kept: again.properties.get('saves') };
}

/** Train an adapter of a decoder, and generate with it. */
export async function generate({ prompt, data }) {
  const opened = await kit.TrainingPackage.open(PACKAGE);
  const session = await kit.TrainingSession.create({ package: opened }, { ort });
  session.setLearningRate(0.01);
  const { input_ids: tokens } = await batchOf(data, 0);
  for (let i = 0; i < 3; i++) await session.stepOn({ input_ids: tokens, labels: tokens });
  const adapter = await kit.onnxAdapter(opened, session.state);
  const generator = await kit.Generator.open(opened, { ort });
  const forms = [adapter, await kit.peftAdapter(opened, session.state), session.state];
  const found = [];
  for (const form of forms) {
    await generator.addAdapter('it', form);
    found.push([]);
    for await (const token of generator.generate(prompt, { adapter: 'it', maxTokens: 9 })) {
      found.at(-1).push(token);
    }
  }
  return { found, saved: btoa(String.fromCharCode(...adapter)) };
}

/** A training that stays on the device; every other loss is read. */
export async function resident(task) {
  let opened = 0;
  const { create } = ort.InferenceSession;
  ort.InferenceSession.create = (...given) => (opened++, create.apply(ort.InferenceSession, given));
  const batch = await batchOf(task.data, 0);
  const options = { ...optionsOf(task), loss: 'every' };
  const session = await kit.TrainingSession.create({ package: PACKAGE }, options);
  const checked = opened;
  session.setLearningRate(task.rate);
  const losses = [];
  for (let step = 0; step < task.steps; step++) losses.push(await session.trainBatch(batch));
  const part = await session.runTrainStep(batch).catch(({ code }) => code);
  const vector = [...(await session.getContiguousParameters()).data];
  const [first] = Object.keys(task.data);
  const bad = { ...batch, [first]: batch[first].type !== 'float32' ? batch[first] : new ort.Tensor(
    'float32', batch[first].data.map(() => 3e38), batch[first].dims) };
  if (bad[first] !== batch[first]) await session.stepOn(bad);
  const skipped = session.skippedSteps;
  const evaluated = session.lossOf(await session.runEvalStep(batch));
  const blob = await session.state.toBlob(true);
  await session.release();
  opened = 0;
  const state = await kit.CheckpointState.load(blob);
  const again = await kit.TrainingSession.create(
    { package: PACKAGE, checkpointState: state }, { ...options, loss: 2 });
  const rest = [];
  const read = [];
  for (let step = 0; step < 4; step++) rest.push(await again.trainBatch(batch));
  for (let step = 0; step < 2; step++) read.push(Object.keys(await again.stepOn(batch)));
  const { step } = state.optimizer;
  await again.release();
  return { losses, part, vector, evaluated, skipped, rest, read, step,
           checks: [checked, opened], after: [...state.parameters.values()].every(
             ({ data }) => !(data instanceof Float32Array) || data.every(Number.isFinite)) };
}

/** Several trainings: rates and steps; what each leaves. */
export async function trainings(task) {
  const batch = await batchOf(task.data, 0);
  const found = [];
  for (const [rate, steps] of task.runs) {
    const options = { ...optionsOf(task), loss: 'every' };
    const session = await kit.TrainingSession.create({ package: PACKAGE }, options);
    session.setLearningRate(rate);
    const losses = [];
    for (let step = 0; step < steps; step++) losses.push(await session.trainBatch(batch));
    const vector = [...(await session.getContiguousParameters()).data];
    const model = [...await session.inferenceModel()];
    await session.release();
    found.push({ losses, vector, model });
  }
  return { found };
}

/** The conformance suite. */
export function suite() {
  const at = (path) => new URL(`/suite/${path}`, location.href);
  return runSuite({ kit, ort, read: (path) => bytesOf(at(path)), at, exact: false });
}

/** Read the files of these names, or without names the hostile corpus; a line for each. */
export async function read(names) {
  const { parseManifest } = await import('/odtpack/manifest.js');
  const at = (path) => new URL(path.split('/').map(encodeURIComponent).join('/'),
    new URL('/files/', location.href));
  const sha256 = async (bytes) => Array.from(
    new Uint8Array(await crypto.subtle.digest('SHA-256', bytes.slice())),
    (byte) => byte.toString(16).padStart(2, '0')).join('');
  const context = { kit, ort, parseManifest, read: (path) => bytesOf(at(path)), at, sha256 };
  const lines = [];
  for await (const line of names ? readings(context, names) : hostile(context)) lines.push(line);
  return { lines };
}

/** What an app may do with sessions, so many times. */
export const sessions = (times) => stress({
  kit, ort, source: '/package', roots: '/roots', times,
});
