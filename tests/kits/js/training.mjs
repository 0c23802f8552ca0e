// usage: node training.mjs KIT JSON: trains as {package, checkpoint?, data: {input: {file, dtype,
// shape}}, steps, rate?, save, threads} says; prints losses, memory and processor time as JSON.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [root, text] = process.argv.slice(2);
const task = JSON.parse(text);
const { TrainingSession } = await import(pathToFileURL(join(root, 'dist/index.js')));
const ARRAYS = { float32: Float32Array, int64: BigInt64Array };
const session = await TrainingSession.create(
  { package: task.package, ...(task.checkpoint && { checkpointState: task.checkpoint }) },
  { intraOpNumThreads: task.threads ?? 1 },
);
if (task.rate) session.setLearningRate(task.rate);
const feeds = Object.fromEntries(
  Object.entries(task.data).map(([name, { file, dtype, shape }]) => {
    const data = new ARRAYS[dtype](new Uint8Array(readFileSync(file)).buffer);
    return [name, new session.ort.Tensor(dtype, data, shape)];
  }),
);
const losses = [];
const resident = [];
const times = [];
for (let step = 0; step < task.steps; step++) {
  const before = process.cpuUsage();
  losses.push(session.lossOf(await session.runTrainStep(feeds)));
  await session.runOptimizerStep();
  await session.lazyResetGrad();
  const { user, system } = process.cpuUsage(before);
  times.push((user + system) / 1000);
  if (step % 500 === 499) {
    globalThis.gc?.();
    resident.push(process.memoryUsage().rss);
  }
}
if (task.save) await session.saveCheckpoint(task.save);
console.log(JSON.stringify({ losses, resident, times }));
