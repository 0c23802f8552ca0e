// Runs the cases of the conformance suite (docs/formats/package.md) in Node and in a browser.
// The caller passes the kit, ONNX Runtime, and how to read a file of the suite.

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: Uint16Array, bool: Uint8Array,
  int8: Int8Array, int16: Int16Array, int32: Int32Array, int64: BigInt64Array,
  uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array,
};

export async function runSuite({ kit, ort, read, at, exact, options = {} }) {
  const index = JSON.parse(new TextDecoder().decode(await read('index.json')));
  const results = {};
  for (const { name } of index.cases) {
    const load = (path) => read(`${name}/${path}`);
    const entry = JSON.parse(new TextDecoder().decode(await load('case.json')));
    const inCase = (path) => at(`${name}/${path}`);
    const run = new Case({ kit, ort, load, at: inCase, entry, exact, options });
    try {
      await run[entry.kind]();
      results[name] = run.worst;
    } catch (error) {
      results[name] = `${error.code ?? error.name}: ${error.stack}`;
    }
  }
  return results;
}

class Case {
  worst = 0; // largest difference relative to what is allowed for in the case, 0 if bit-equal

  constructor(fields) {
    Object.assign(this, fields);
    this.exact = fields.exact && fields.entry.exact !== false;
  }

  async tensors(list) {
    const feeds = {};
    for (const { name, dtype, shape, file, offset } of list) {
      const count = shape.reduce((a, b) => a * b, 1);
      const bytes = count ? await this.load(file) : new Uint8Array();
      const size = count * ARRAYS[dtype].BYTES_PER_ELEMENT;
      const data = new ARRAYS[dtype](bytes.slice(offset, offset + size).buffer);
      feeds[name] = new this.ort.Tensor(dtype, data, shape);
    }
    return feeds;
  }

  near(what, found, wanted, scale = Math.max(1, Math.abs(wanted))) {
    if (Object.is(found, wanted) || (Number.isNaN(found) && Number.isNaN(wanted))) return;
    const difference = Math.abs(found - wanted) / scale;
    const allowed = this.exact ? 0 : this.entry.tolerance;
    if (!(difference <= allowed)) {
      throw new Error(`${what}: ${found} and not ${wanted} (${difference})`);
    }
    this.worst = Math.max(this.worst, difference);
  }

  arrays(what, found, wanted) {
    if (found.length !== wanted.length) throw new Error(`${what}: ${found.length} elements`);
    let largest = 0;
    for (const value of wanted) largest = Math.max(largest, Math.abs(Number(value)));
    for (let i = 0; i < wanted.length; i++) {
      // Not below 1: some gradients are zero but for rounding, and Adam makes steps of them.
      this.near(`${what}[${i}]`, Number(found[i]), Number(wanted[i]), Math.max(largest, 1));
    }
  }

  async session(checkpoint = this.entry.checkpoint) {
    const models = Object.values(this.entry.models ?? {});
    return this.kit.TrainingSession.create(
      {
        package: this.at(this.entry.package),
        ...(checkpoint && { checkpointState: this.at(checkpoint) }),
        format: models.some((path) => path.endsWith('.ort')) ? 'ort' : 'onnx',
      },
      { ort: this.ort, ...this.options },
    );
  }

  async train() {
    const { entry } = this;
    const session = await this.session();
    await this.steps(session);
    if (session.skippedSteps !== (entry.skipped_steps ?? 0)) {
      throw new Error(`${session.skippedSteps} steps were skipped`);
    }
    if (entry.evaluation) {
      const batch = await this.tensors(entry.evaluation.inputs);
      this.near('evaluation', session.lossOf(await session.runEvalStep(batch)), entry.evaluation.loss);
      const { accuracy = null } = await session.evaluate([batch]);
      if (this.exact && accuracy !== entry.evaluation.accuracy) throw new Error(`accuracy: ${accuracy}`);
    }
    for (const [name, value] of Object.entries(entry.properties ?? {})) {
      session.state.properties.set(name, value);
    }
    if (entry.after) await this.saved(session);
    if (entry.export) await this.exported(session);
    await session.release();
  }

  resume() {
    return this.train();
  }

  not_finite() {
    return this.train();
  }

  async steps(session) {
    const { entry } = this;
    if (entry.learning_rate !== null && entry.learning_rate !== undefined) {
      session.setLearningRate(entry.learning_rate);
    }
    if (entry.schedule) {
      session.setSchedule(entry.schedule.kind, entry.schedule.initial_lr, entry.schedule.settings);
    }
    const scheduled = entry.schedule || (entry.kind === 'resume' && session.restoreSchedule());
    for (const [i, step] of entry.steps.entries()) {
      const skipped = session.skippedSteps;
      const results = await session.runTrainStep(await this.tensors(step.inputs));
      if (session.skippedSteps - skipped !== (step.not_finite ? 1 : 0)) {
        throw new Error(`step ${i}: ${session.skippedSteps - skipped} skipped`);
      }
      if (!step.not_finite) this.near(`loss of step ${i}`, session.lossOf(results), step.loss);
      else if (Number.isFinite(session.lossOf(results))) throw new Error(`loss of step ${i}`);
      else if (session.lastNotFinite.code !== step.not_finite) {
        throw new Error(`step ${i}: ${session.lastNotFinite.code}`);
      }
      for (const [name, tensor] of Object.entries(await this.tensors(step.outputs ?? []))) {
        this.arrays(name, results[name].data, tensor.data);
      }
      if (step.update) {
        if (step.rate !== undefined) this.near('rate', session.getLearningRate(), step.rate, 1);
        const { stepCount: made } = session;
        await session.runOptimizerStep();
        if (scheduled && session.stepCount > made) session.schedulerStep();
      }
      if (step.reset) await session.lazyResetGrad();
    }
  }

  async saved(session) {
    const { kit, entry } = this;
    const blob = await session.state.toBlob(true);
    const own = await kit.CheckpointState.load(new Uint8Array(await blob.arrayBuffer()));
    const wanted = await kit.CheckpointState.load(this.at(entry.after));
    const names = (state) => [...state.parameters.keys()].sort().join();
    if (names(own) !== names(wanted)) throw new Error('after: other parameters');
    // Batch normalization in training mode is badly conditioned: other kernels, other parameters.
    const text = new TextDecoder().decode(await this.load(`${entry.package}/manifest.json`));
    const manifest = JSON.parse(text);
    const comparable = this.exact || manifest.parameters.every(({ role }) => role !== 'state');
    for (const [name, { data, dtype }] of comparable ? wanted.parameters : []) {
      this.arrays(name, floats(own.parameters.get(name).data, dtype), floats(data, dtype));
    }
    if (own.optimizer?.step !== wanted.optimizer?.step) throw new Error('after: another step');
    for (const [name, moments] of (comparable && wanted.optimizer?.moments) || []) {
      for (const [i, { data }] of moments.entries()) {
        this.arrays(`${name} momentum${i}`, own.optimizer.moments.get(name)[i].data, data);
      }
    }
    const groups = (state) => JSON.stringify([state.optimizer?.groups, state.optimizer?.kind]);
    if (groups(own) !== groups(wanted)) {
      throw new Error(`after: groups ${groups(own)}, ${groups(wanted)}`);
    }
    const properties = ({ properties: { values } }) =>
      String([...values].map(([name, { kind, value }]) => [name, kind, value]).sort());
    if (properties(own) !== properties(wanted)) {
      throw new Error(`after: properties ${properties(own)} and not ${properties(wanted)}`);
    }
  }

  async exported(session) {
    const { entry, ort } = this;
    const bytes = await session.inferenceModel();
    const wanted = await this.load(entry.export.file);
    if (this.exact && !(bytes.length === wanted.length && bytes.every((b, i) => b === wanted[i]))) {
      throw new Error('export: other bytes');
    }
    const model = await ort.InferenceSession.create(bytes, this.options);
    const results = await model.run(await this.tensors(entry.export.inputs));
    for (const [name, tensor] of Object.entries(await this.tensors(entry.export.outputs))) {
      // Another build of ONNX Runtime multiplies in another order.
      const before = this.entry.tolerance;
      if (!this.exact) this.entry.tolerance = Math.max(before, 1e-5);
      this.arrays(name, results[name].data, tensor.data);
      this.entry.tolerance = before;
    }
    await model.release();
  }

  async error() {
    const { kit, entry } = this;
    const actions = {
      open: () => kit.TrainingPackage.open(this.at(entry.package)),
      load_checkpoint: () => kit.CheckpointState.load(this.at(entry.checkpoint)),
      session: () => this.session(),
      export: async () => (await this.session()).inferenceModel(entry.outputs),
      step: async () => (await this.session()).runTrainStep(await this.tensors(entry.inputs)),
    };
    let code;
    try {
      await actions[entry.action]();
    } catch (error) {
      if (!(error instanceof kit.OdtpackError)) throw error;
      code = error.code;
    }
    if (code !== entry.code) throw new Error(`${entry.action}: ${code} and not ${entry.code}`);
  }

  /** In a browser the save before is named: there are no files beside an address. */
  async recover() {
    const { kit, entry } = this;
    const before = this.at(entry.previous);
    const state = await kit.CheckpointState.load(this.at(entry.checkpoint), before);
    const said = [`of optimizer step ${entry.step}:`];
    if (entry.lost) said.push(`${entry.lost} optimizer steps made since`);
    if (!said.every((words) => state.recovered?.includes(words))) {
      throw new Error(`recovered: ${state.recovered}`);
    }
    const wanted = await kit.CheckpointState.load(before);
    for (const [name, { data }] of wanted.parameters) {
      this.arrays(name, state.parameters.get(name).data, data);
    }
    if (state.optimizer.step !== entry.step || !state.checked) throw new Error('another state');
  }

  async self_check() {
    let code;
    try {
      await this.kit.selfCheck(this.at(this.entry.package), { ort: this.ort, ...this.options });
    } catch (error) {
      code = error.code ?? error.stack;
    }
    if (code !== (this.entry.code ?? undefined)) {
      throw new Error(`self_check: ${code} and not ${this.entry.code}`);
    }
  }

  async nominal() {
    const session = await this.session();
    const inputs = await this.tensors(this.entry.steps[0].inputs);
    const code = await session.runTrainStep(inputs).then(() => undefined, (error) => error.code);
    if (code !== 'nominal-state') throw new Error(`a step of a nominal state: ${code}`);
    const values = Object.values(await this.tensors([this.entry.values]))[0];
    await session.loadParametersBuffer(values, false);
    await this.steps(session);
    await session.release();
  }

  async buffer() {
    const session = await this.session();
    const wanted = Object.values(await this.tensors([this.entry.values]))[0];
    const found = await session.getContiguousParameters(false);
    this.arrays('buffer', found.data, wanted.data);
    await session.release();
  }
}

function floats(data, dtype) {
  return dtype === 'float16' ? Array.from(data) : data;
}
