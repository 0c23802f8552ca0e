import * as ort from 'onnxruntime-web/wasm';
import { TrainingSession } from 'odtpack';

const { input, labels: label } = batch(0);
const refused = await session.trainBatch({ input }).catch((error) => error.code);
const { output } = await session.predict({ input });
const steps = await session.stepCount();
const skipped = (await session.lastNotFinite()) ?? null;
const lost = await trainInWorker({ package: 'public/package', checkpointState: {} }).catch(
  (error) => error.code);
await session.release();

// Goes on in the page, with the module that the kit imports itself.
const own = await TrainingSession.create({ package: 'public/package', checkpointState: file });
const tensor = ({ type, data, dims }) => new ort.Tensor(type, data, dims);
losses.push(await own.trainBatch({ input: tensor(input), labels: tensor(label) }));
const { dims, data } = output;
window.result = { losses, refused, steps, dims, scores: data.length, skipped, lost };
