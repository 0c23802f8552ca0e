// usage: node calls.mjs KIT FOLDER: calls of a session in orders that an app may get wrong, and with
// arguments that it may get wrong, on the packages of FOLDER; what came of each, as JSON.
import { readFileSync } from 'node:fs';
import { join, relative } from 'node:path';
import { pathToFileURL } from 'node:url';

const [root, folder] = process.argv.slice(2);
const kit = await import(pathToFileURL(join(root, 'dist/index.js')));
const { carryOver, CheckpointState, makeSchedule, TrainingPackage, TrainingSession } = kit;
const at = (name) => join(folder, name);
const open = (name, options) =>
  TrainingSession.create({ package: at(name) }, { intraOpNumThreads: 1, ...options });
const outcome = async (work) => {
  try {
    return (await work()) ?? null;
  } catch (error) {
    return error instanceof kit.OdtpackError ? error.code : `foreign: ${error}`;
  }
};
const tensor = (type, data, dims = [data.length]) => ({ type, data, dims });
const rows = (seed) => tensor('float32', Float32Array.from({ length: 16 }, (_, i) => 1 + Math.sin(seed + i) / 2), [4, 4]);
const labels = tensor('int64', BigInt64Array.of(0n, 1n, 2n, 0n));
const batch = (seed) => ({ input: rows(seed), labels });
const words = (last) => ({ words: tensor('int64', BigInt64Array.of(1n, 2n, 3n, last)), labels });
const bad = { input: tensor('float32', new Float32Array(16).fill(NaN), [4, 4]), labels };
const content = async ({ state }) => Buffer.from(await (await state.toBlob(true)).arrayBuffer()).toString('base64');
const found = {};

// A step that is void, in the last session of a state, and then optimizer steps.
async function voided(name, good, wrong, way, { spoiler } = {}) {
  const session = await open(name);
  await session.stepOn(good);
  const before = await content(session);
  const other = spoiler && (await TrainingSession.create({ package: at(name), checkpointState: session.state }));
  const last = other ?? session;
  if (other) {
    await last.stepOn(good);
    await last.runTrainStep(good);
  }
  const middle = await content(last);
  const code = await outcome(async () => session.lossOf(await session.runTrainStep(wrong)));
  for (const call of way) await last[call]();
  const kept = [(await content(last)) === middle, Boolean(other) || middle === before, last.stepCount];
  const gradients = new Float32Array(session.state.flat.gradients).every(Number.isFinite);
  await last.runTrainStep(good);
  await last.runOptimizerStep();
  return [String(code), ...kept, gradients, last.stepCount];
}
const twice = ['runOptimizerStep', 'lazyResetGrad', 'runOptimizerStep'];
found.skipped = await voided('roots', batch(1), bad, twice);
found.failed = await voided('words', words(4n), words(50n), twice);
found.shared = await voided('roots', batch(1), bad, ['runOptimizerStep'], { spoiler: true });

// A buffer with values that the frozen parameters of float16 do not hold.
const narrow = await open('narrow');
const before = await content(narrow);
const large = (await narrow.getContiguousParameters(false)).data.fill(1e6);
found.narrow = [await outcome(() => narrow.loadParametersBuffer(large, false)), (await content(narrow)) === before];

// What begins the count of batches again.
const counting = await open('accumulating');
const counts = async (...calls) => {
  for (const call of calls) await (call === 'batch' ? counting.trainBatch(batch(1)) : counting[call](batch(1)));
  return counting.stepCount;
};
found.counts = [
  await counts('batch', 'batch', 'lazyResetGrad', 'batch', 'batch'), await counts('batch'),
];
const spoiler = await TrainingSession.create({
  checkpointState: counting.state, trainModel: at('accumulating/training_model.onnx') });
await counts('batch', 'batch');
await spoiler.runTrainStep(bad);
found.counts.push(await counts('batch'));
found.single = await counting.stepOn(batch(1)).catch(({ code }) => code);

// A rate that was set stays where no step is made; the schedule goes on with the next one.
const rated = await open('cosine');
found.proposed = [rated.useProposedSchedule(10), (await open('roots')).useProposedSchedule(10)];
for (let i = 0; i < 3; i++) await rated.trainBatch(batch(i));
const follows = rated.getLearningRate();
rated.setLearningRate(0.5);
await rated.trainBatch(bad);
const kept = rated.getLearningRate();
await rated.trainBatch(batch(1));
found.rates = [follows, kept, rated.getLearningRate()];
found.schedule = rated.state.properties.get('odtpack.schedule');

// States and packages that do not go together, and sessions that cannot be made.
const files = (...names) => Object.fromEntries(names.map((name, i) =>
  [['checkpointState', 'trainModel', 'evalModel', 'optimizerModel'][i], name]));
const own = (name, other = name) => files(at(`${name}/checkpoint`), at(`${name}/training_model.onnx`),
  at(`${other}/eval_model.onnx`), at(`./${name}/optimizer_model.onnx`));
const trained = await open('roots');
await trained.stepOn(batch(1));
const saved = await trained.state.toBlob(true);
const wanted = await trained.trainBatch(batch(2));
const create = (name, checkpointState) => outcome(async () =>
  (await TrainingSession.create({ package: at(name), checkpointState })).trainBatch(batch(2)));
const fresh = await CheckpointState.load(saved);
found.states = [await create('groups', trained.state), await create('sgd', fresh),
  (await create('groups', fresh)) === wanted, await create('sgd', trained.state),
  typeof (await outcome(() => trained.trainBatch(batch(3))))];
fresh.device = { refresh: async () => {}, wrote: () => {} };
found.elsewhere = [await create('groups', fresh), fresh.device !== undefined];
found.files = [await outcome(() => TrainingSession.create(own('roots')).then(() => null)),
  await outcome(() => TrainingSession.create(own('roots', 'groups'))),
  await outcome(() => TrainingSession.create({ ...own('roots'),
    trainModel: relative('.', at('roots/training_model.onnx')) }).then(() => null))];

// Scores: of equal ones the first counts, 0 and -0 are equal, and NaN is above all numbers.
const scores = tensor('float32', Float32Array.of(-0, 0, -1, 0, NaN, 2, NaN, 1, NaN, 1, 2, 2), [4, 3]);
const scored = await open('scores');
found.accuracies = [];
for (const label of [0n, 1n, 2n]) {
  const each = { input: scores, labels: tensor('int64', new BigInt64Array(4).fill(label)) };
  found.accuracies.push((await scored.evaluate([each])).accuracy);
}

// Arguments.
const session = await open('roots');
const states = [await CheckpointState.load(saved), await CheckpointState.load(saved)];
const web = new URL('http://127.0.0.1/a');
const plain = Object.fromEntries(['manifest.json', 'checkpoint'].map((name) => [name, readFileSync(at(`roots/${name}`))]));
const wrong = {
  'bad-argument': [
    () => TrainingSession.create(), () => TrainingSession.create('roots'), () => TrainingSession.create({}),
    () => TrainingSession.create({ package: undefined }), () => TrainingSession.create({ package: null }),
    () => TrainingSession.create({ package: plain }), () => TrainingSession.create({ package: 5 }),
    () => TrainingSession.create({ package: at('roots'), checkpointState: null }),
    () => TrainingPackage.open(), () => TrainingPackage.open(null), () => TrainingPackage.open(plain),
    () => CheckpointState.load(5), () => CheckpointState.load(), () => CheckpointState.load({}),
    () => session.state.loadParameters(null), () => session.saveCheckpoint(),
    () => session.saveCheckpoint({}), () => session.lossOf({}), () => session.lossOf(),
    async () => session.lossOf(await session.runEvalStep(batch(1), ['output'])),
    () => session.evaluate(batch(1)), () => session.fit(batch(1)), () => session.evaluate(), () => session.fit(5), () => session.fit([], 5),
    () => session.exportModelForInference(), () => session.exportModelForInference(5),
    () => session.exportModelForInference(web), () => session.saveCheckpoint(''),
    () => carryOver(null, states[0]), () => carryOver(states[0], 5),
    () => carryOver(states[0], states[1], 5), () => carryOver(states[0], states[1], 'scale'),
  ],
  busy: [() => carryOver(states[0], session.state)],
  'empty-batch': [() => session.evaluate([])],
  'bad-schedule': [
    () => session.setSchedule('linear', 0.1, null), () => session.setSchedule('linear', 0.1, 5),
    () => session.registerLinearLRScheduler(10n, 50n, 0.1), () => makeSchedule(5n),
    () => session.setSchedule('multistep', 0.1, { milestones: [5n] }),
  ],
  'bad-policy': ['Stop', null, 1, ''].map((onNotFinite) => () => open('roots', { onNotFinite })),
  'property-type': [() => session.state.properties.set('odtpack.optimizer', 'sgd')],
  'unknown-output': [
    () => session.runTrainStep(batch(1), { none: null }), () => session.runEvalStep(batch(1), ['none']),
  ],
  'input-type': [() => session.trainBatch({ ...batch(1), labels: { ...labels, data: new Int32Array(4) } })],
  'input-shape': [() => session.trainBatch({ ...batch(1), labels: { type: 'int64', dims: [4] } })],
};
found.wrong = {};
for (const [code, calls] of Object.entries(wrong)) {
  for (const [i, call] of calls.entries()) {
    const came = await outcome(call);
    if (came !== code) found.wrong[`${code} ${i}`] = came;
  }
}
const said = (call) => call().then(() => '', ({ message }) => message.split('\n').join(' '));
found.said = [await said(wrong['input-type'][0]), await said(() => open('words').then((each) => each.runTrainStep(words(50n))))];
found.lists = [await outcome(async () => typeof await session.trainBatch({ ...batch(1), input: { ...rows(1), data: [...rows(1).data] } }))];
console.log(JSON.stringify(found));
