// usage: node former.mjs KIT PACKAGE: the calls of the old API, with the files of a package.
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [root, at] = process.argv.slice(2);
const { TrainingSession } = await import(pathToFileURL(join(root, 'dist/index.js')));
const session = await TrainingSession.create({
  checkpointState: `${at}/checkpoint`, trainModel: `${at}/training_model.onnx`,
  evalModel: `${at}/eval_model.onnx`, optimizerModel: `${at}/optimizer_model.onnx`,
}, { intraOpNumThreads: 1 });
const { Tensor } = session.ort;
const feeds = {
  input: new Tensor('float32', new Float32Array(128).fill(0.5), [2, 1, 8, 8]),
  labels: new Tensor('int64', BigInt64Array.of(1n, 2n), [2]),
};
const names = [session.trainingInputNames, session.evalOutputNames];
const both = await session.runTrainStep(feeds);
const one = await session.runTrainStep(feeds, ['output'], { logSeverityLevel: 2 });
await session.runOptimizerStep();
await session.lazyResetGrad();
const size = await session.getParametersSize(true);
const buffer = await session.getContiguousParameters(true);
const before = (await session.runEvalStep(feeds)).loss.data[0];
const bytes = new Uint8Array(buffer.data.buffer);
await session.loadParametersBuffer(new Uint8Array(bytes.length), true);
const zeros = (await session.runEvalStep(feeds)).loss.data[0];
await session.loadParametersBuffer(bytes, true);
const after = (await session.runEvalStep(feeds)).loss.data[0];
const outputs = (await session.predict({ input: feeds.input })).output.data;
const evaluation = await session.evaluate([feeds, feeds]);
const other = { ...feeds, input: new Tensor('float32', new Float32Array(128), [2, 1, 8, 8]) };
const alone = (await session.runTrainStep(feeds)).loss.data[0];
const second = session.runTrainStep(feeds);
const busy = await session.runTrainStep(other).then(() => 'ran', (error) => error.code);
const unmoved = (await second).loss.data[0] === alone;
const unknown = await session.runTrainStep(feeds, ['no']).then(() => 'ran', (error) => error.code);
await session.release();
console.log(JSON.stringify({
  names, both: Object.keys(both), one: Object.keys(one), size, length: buffer.data.length,
  before, zeros, after, busy, unmoved, unknown, outputs: Array.from(outputs), evaluation,
}));
