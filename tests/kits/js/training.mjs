// usage: node training.mjs KIT JSON: trains as {package, checkpoint?, data: {input: {file, dtype,
// shape}}, steps, rate?, save, threads} says; prints losses, memory and processor time as JSON.
// With `batches`, a list in the place of `data`, one after the other; `evaluate` asks for the losses
// of all in the end, `accumulate` makes a step of several batches, `fetched` has the package's files in memory, as a browser does,
// and `ort` passes ONNX Runtime in, imported before the kit.
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [root, text] = process.argv.slice(2);
const task = JSON.parse(text);
const load = (path) => import(pathToFileURL(join(root, path)));
const ort = task.ort && (await load('node_modules/onnxruntime-node/dist/index.js')).default;
const { TrainingSession } = await load('dist/index.js');
const ARRAYS = { float32: Float32Array, int64: BigInt64Array };
/** A figure of the kernel's about this process, in bytes; there is none but on Linux. */
function figure(name) {
  const path = '/proc/self/status';
  const text = existsSync(path) ? readFileSync(path, 'utf8') : '';
  return 1024 * Number(new RegExp(`${name}:\\s*(\\d+)`).exec(text)?.[1] ?? 0);
}
const before = figure('RssAnon');
const files = () => readdirSync(task.package).map((name) => [
  name, new Uint8Array(readFileSync(join(task.package, name))),
]);
const source = task.fetched ? new Map(files()) : task.package;
const session = await TrainingSession.create(
  { package: source, ...(task.checkpoint && { checkpointState: task.checkpoint }) },
  { intraOpNumThreads: task.threads ?? 1, ...(ort && { ort }) },
);
if (task.rate) session.setLearningRate(task.rate);
const batches = (task.batches ?? [task.data]).map((inputs) => Object.fromEntries(
  Object.entries(inputs).map(([name, { file, dtype, shape }]) => {
    const data = new ARRAYS[dtype](new Uint8Array(readFileSync(file)).buffer);
    return [name, new session.ort.Tensor(dtype, data, shape)];
  }),
));
const losses = [];
const resident = [];
const times = [];
for (let step = 0; step < task.steps; step++) {
  const start = process.cpuUsage();
  const count = task.accumulate ?? 1;
  for (let part = step * count; part < (step + 1) * count; part++) {
    const results = await session.runTrainStep(batches[part % batches.length]);
    losses.push(session.lossOf(results));
  }
  await session.runOptimizerStep();
  await session.lazyResetGrad();
  const { user, system } = process.cpuUsage(start);
  times.push((user + system) / 1000);
  if (step % 500 === 499) {
    globalThis.gc?.();
    resident.push(process.memoryUsage().rss);
  }
}
if (task.save) await session.saveCheckpoint(task.save);
const evaluation = [];
for (const feeds of task.evaluate ? batches : []) {
  evaluation.push(session.lossOf(await session.runEvalStep(feeds)));
}
await session.release();
// At its peak; pages of the library's file come, and then stay.
const taken = figure('VmHWM') - figure('RssFile') - before;
console.log(JSON.stringify({ losses, resident, times, evaluation, taken, before }));
