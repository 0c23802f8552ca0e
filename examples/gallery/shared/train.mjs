// Trains the package on the samples in data/. An app passes its own samples instead.
import { existsSync, readFileSync } from 'node:fs';
import { TrainingPackage, TrainingSession } from 'odtpack';
import * as ort from 'onnxruntime-node';

const INPUTS = [
  // name, type, shape of a sample
@INPUTS@
];
const BATCH = @BATCH@;
const STEPS = Number(process.argv[2] ?? 100);
const SAVED = 'trained.ckpt';

const data = INPUTS.map(([name, type, shape]) => {
  const { buffer } = new Uint8Array(readFileSync(`data/${name}.bin`));
  const numbers = type === 'float32' ? new Float32Array(buffer) : new BigInt64Array(buffer);
  return { name, type, shape, numbers, size: shape.reduce((product, axis) => product * axis, 1) };
});
const samples = data[0].numbers.length / data[0].size;

function batch(number) {
  const first = (number * BATCH) % (samples - BATCH + 1);
  return Object.fromEntries(
    data.map(({ name, type, shape, numbers, size }) => {
      const part = numbers.subarray(first * size, (first + BATCH) * size);
      return [name, new ort.Tensor(type, part, [BATCH, ...shape])];
    }),
  );
}

const resumed = existsSync(SAVED);
const session = await TrainingSession.create(
  { package: await TrainingPackage.open('package'), ...(resumed && { checkpointState: SAVED }) },
  { ort },
);
if (!resumed) session.registerLinearLRScheduler(10, STEPS, @RATE@);
else session.restoreSchedule();
const { properties } = session.state;
const each = session.accumulationSteps;
for (let done = properties.get('app.batches') ?? 0; done < STEPS * each;) {
  const loss = await session.trainBatch(batch(done));
  properties.set('app.batches', ++done);
  if (done % (20 * each) === 0) {
    console.log(session.stepCount, loss);
    await session.saveCheckpoint(SAVED);
  }
}
await session.saveCheckpoint(SAVED);
await session.exportModelForInference('personal.onnx');
await session.release();
