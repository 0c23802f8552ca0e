// What an app may do with a session, again and again, in Node and in a browser (docs/formats/kits.md,
// "Using a session"). The caller passes the kit, ONNX Runtime, a package with batch normalization
// built without `--output`, one whose loss is finite and a gradient is not, and how often.

export async function stress({ kit, ort, source, roots, times }) {
  const open = (options = {}, from = source) => kit.TrainingSession.create({ package: from }, { ort, ...options });
  const first = await open();
  const [input, labels] = first.trainingInputNames;
  const shape = (await kit.TrainingPackage.open(source)).manifest.inputs[0].shape.slice(1);
  const size = shape.reduce((a, b) => a * b, 8);
  const batch = (seed) => ({
    [input]: new ort.Tensor('float32', Float32Array.from({ length: size }, (_, i) => Math.sin(seed + i)), [8, ...shape]),
    [labels]: new ort.Tensor('int64', BigInt64Array.from({ length: 8 }, (_, i) => BigInt(i % 3)), [8]),
  });
  const poisoned = batch(3);
  poisoned[input].data[7] = NaN;
  const outcome = (promise) => promise.then(() => 'ok', (error) => error.code ?? String(error));
  const content = async ({ state }) => {
    const bytes = await (await state.toBlob(true)).arrayBuffer();
    return String(new Uint8Array(await crypto.subtle.digest('SHA-256', bytes)));
  };
  const found = {};
  const note = (key, value) => (found[key] ??= new Set()).add(JSON.stringify(value));

  const evaluated = await first.runEvalStep(batch(1));
  const { [input]: inputs, [labels]: truth } = batch(1);
  const predicted = await first.predict({ [input]: inputs });
  const { accuracy } = await first.evaluate([batch(1)]);
  const [name] = Object.keys(predicted);
  const scores = Array.from(predicted[name].data);
  const right = Array.from(truth.data, Number).filter((label, i) => {
    const row = scores.slice(3 * i, 3 * i + 3);
    return row.indexOf(Math.max(...row)) === label;
  });
  note('evaluation', [Object.keys(evaluated), Object.keys(predicted), accuracy === right.length / 8]);
  note('null tensor', await outcome(first.runTrainStep({ ...batch(1), [input]: null })));
  const gone = batch(1);
  for (const tensor of Object.values(gone)) tensor.dispose();
  note('disposed tensors', [
    await outcome(first.runTrainStep({ ...batch(1), [input]: gone[input] })),
    await outcome(first.runTrainStep({ ...batch(1), [labels]: gone[labels] })),
  ]);
  // A batch of plain objects, and some that are no tensors.
  const plain = ({ type, data, dims }) => ({ type, data, dims });
  const bare = { [input]: plain(inputs), [labels]: plain(truth) };
  const loss = first.lossOf(await first.runEvalStep(bare));
  const codes = [await outcome(first.evaluate([bare, batch(1)]))];
  for (const data of [inputs.data.slice(1), null, Float64Array.from(inputs.data)]) {
    codes.push(await outcome(first.trainBatch({ ...bare, [input]: { ...bare[input], data } })));
  }
  note('plain objects', [loss === first.lossOf(evaluated), ...codes]);
  // The rate of a warm-up is 0 at first, whatever it goes to.
  const rates = await Promise.all([NaN, -1, Infinity, '1'].map((rate) =>
    outcome((async () => first.registerLinearLRScheduler(2, 4, rate))())));
  note('rates', [...rates, first.restoreSchedule()]);
  await first.release();

  // A second session of a state takes its moments over, and keeps what the first accumulated.
  const one = await open();
  await one.runTrainStep(batch(1));
  const accumulated = String(new Float32Array(one.state.flat.gradients));
  const two = await kit.TrainingSession.create({ package: source, checkpointState: one.state }, { ort });
  const kept = String(new Float32Array(one.state.flat.gradients)) === accumulated;
  const refused = await Promise.all([
    await outcome(one.stepOn(batch(1))), await outcome(one.trainBatch(batch(1))),
    await outcome(one.runOptimizerStep()), await outcome(one.saveCheckpoint('never.ckpt')),
    await outcome(one.runEvalStep(batch(1))),
  ]);
  await two.runOptimizerStep();
  const plainly = await open();
  await plainly.runTrainStep(batch(1));
  await plainly.runOptimizerStep();
  note('two sessions of a state', [kept, refused, one.stepCount, two.stepCount,
    (await content(two)) === (await content(plainly))]);
  for (const session of [one, two, plainly]) await session.release();

  // The last of three models does not load: the others are freed.
  let [created, released] = [0, 0];
  const create = async (...given) => {
    if (created === 2) throw new Error('it does not load');
    const session = await ort.InferenceSession.create(...given);
    created += 1;
    const release = session.release.bind(session);
    session.release = () => release(released += 1);
    return session;
  };
  const failing = Object.create(ort, { InferenceSession: { value: { create } } });
  note('a model that does not load', [await outcome(open({ ort: failing })), created, released]);

  for (let round = 0; round < times; round++) {
    // Closed during a step: the step ends, and the state is as after it.
    const closing = await open();
    const step = closing.trainBatch(batch(round));
    const both = await Promise.all([outcome(step), outcome(closing.release()), outcome(closing.release())]);
    const other = await open();
    await other.trainBatch(batch(round));
    note('closed during a step', [both, (await content(closing)) === (await content(other))]);

    // After it is closed.
    const calls = [
      ['runTrainStep', batch(1)], ['runEvalStep', batch(1)], ['runOptimizerStep'], ['lazyResetGrad'],
      ['stepOn', batch(1)], ['trainBatch', batch(1)], ['fit', [batch(1)]], ['predict', batch(1)],
      ['evaluate', [batch(1)]], ['setLearningRate', 0.1], ['setSchedule', 'constant', 0.1, {}],
      ['restoreSchedule'], ['schedulerStep'], ['getParametersSize'], ['getContiguousParameters'],
      ['loadParametersBuffer', new Uint8Array(4)], ['inferenceModel'],
      ['exportModelForInference', 'never.onnx'], ['saveCheckpoint', 'never.ckpt'],
    ];
    const codes = async (session) => new Set(await Promise.all(
      calls.map(([call, ...given]) => outcome((async () => session[call](...given))())),
    ));
    note('after close', [...(await codes(closing))]);
    note('what remains', [closing.stepCount, closing.skippedSteps, closing.trainingInputNames.length]);

    // Two calls at once: the second is refused, and changes nothing.
    const running = other.trainBatch(batch(round + 1));
    note('during a step', [...(await codes(other))]);
    note('the step itself', await outcome(running));
    const alone = await open();
    await alone.fit([batch(round), batch(round + 1)]);
    note('two calls change nothing', (await content(alone)) === (await content(other)));

    // A batch that is not finite changes nothing: parameters, moments, statistics, step count.
    const before = await content(other);
    const loss = await other.trainBatch(poisoned);
    note('not finite', [String(loss), (await content(other)) === before, other.stepCount, other.skippedSteps,
      other.lastNotFinite]);
    // Nor one among others, which count.
    for (const [session, batches] of [[alone, [1, 2]], [other, [1, poisoned, 2]]]) {
      for (const each of batches) await session.runTrainStep(each === poisoned ? each : batch(each));
      await session.runOptimizerStep();
      await session.lazyResetGrad();
    }
    note('one of three', (await content(alone)) === (await content(other)));
    const stopping = await open({ onNotFinite: 'stop' });
    note('stop', [await outcome(stopping.trainBatch(poisoned)), stopping.stepCount, stopping.skippedSteps]);
    // A gradient that is not finite, where the package has a step model as well.
    const [rooted, stopped] = [await open({}, roots), await open({ onNotFinite: 'stop' }, roots)];
    const fresh = await content(rooted);
    const feeds = {
      input: new ort.Tensor('float32', Float32Array.from({ length: 32 }, (_, i) => Math.cos(round + i)), [8, 4]),
      labels: batch(0)[labels],
    };
    const found = rooted.lossOf(await rooted.stepOn(feeds));
    const again = await rooted.trainBatch(feeds);
    note('gradient', [Number.isFinite(found) && found === again, (await content(rooted)) === fresh, rooted.stepCount,
      rooted.skippedSteps, rooted.lastNotFinite]);
    note('stop at a gradient', [await outcome(stopped.trainBatch(feeds)), (await content(stopped)) === fresh,
      stopped.stepCount, stopped.skippedSteps]);
    for (const session of [other, alone, stopping, rooted, stopped]) await session.release();
  }
  return Object.fromEntries(Object.entries(found).map(([key, values]) => [key, [...values].map((each) => JSON.parse(each))]));
}
