/** Train the models of a package on the parameters of a state. */
import type { InferenceSession, Tensor } from 'onnxruntime-common';
import { platform } from '#platform';
import { batchOf, checkBatch, countRight, lossOf, withoutAnswers } from './batch.js';
import { CheckpointState, type SaveOptions } from './checkpoint.js';
import { demand, fail, requireArgument } from './errors.js';
import { type NotFinite, Skipping } from './finite.js';
import { type LossReading, openStepModel, requireResident, ResidentStep } from './gpu.js';
import { converted, inferenceModel } from './inference.js';
import { isIterable, isRecord } from './json.js';
import { evaluationOutputs, type Manifest, type Settings } from './manifest.js';
import {
  checkModel, checkParameters, importRuntime, ownCheckpoint, type PackageFiles, place, resolve,
  type TrainingFiles,
} from './opening.js';
import { DEFAULT_LEARNING_RATE, Optimizer } from './optimizer.js';
import type { ModelName, TrainingPackage } from './package.js';
import type { OnnxRuntime } from './platform.js';
import {
  BUFFER, type Feeds, GRADIENT, isFetches, type Model, openSession, otherProviders,
  type RunArguments, type RunOptions, sessionOptions, tensorOver,
} from './runtime.js';
import {
  ending, makeSchedule, readScheduleText, type Schedule, SCHEDULE_PROPERTY, type ScheduleKind,
  scheduleText,
} from './schedules.js';
import { Network, Segments } from './segments.js';
import {
  ARRAYS, byName, bytesOf, join, product, requireFits, type Stored, type TypedArray,
} from './tensors.js';
import type { Batch } from './worker_calls.js';

/** Options of ONNX Runtime, which take the place of the package's, and ONNX Runtime itself. */
export interface SessionOptions extends InferenceSession.SessionOptions {
  /** The module; `onnxruntime-node` or `onnxruntime-web` are imported if it is left out. */
  ort?: OnnxRuntime;
  /** Take providers beside the processor's without the self-check that they must pass else. */
  trusted?: boolean;
  /**
   * What a training step does whose loss or gradients are not finite, once everything is as it was
   * before it: `skip` counts it (the default), `stop` throws as well.
   */
  onNotFinite?: 'skip' | 'stop';
  /**
   * Train in the memory of a GPU, with `executionProviders: ['webgpu']` and a package that has a
   * step model, and read the loss back at `every` step, at each so many, or never (false). Steps
   * are made by `stepOn`, `trainBatch` and `fit`.
   */
  loss?: LossReading;
}

export interface Evaluation {
  loss: number;
  samples: number;
  /** Share of labels whose class has the highest score; undefined without such an output. */
  accuracy: number | undefined;
}

/** What a session opens, as far as it needs it, and frees again. */
interface Opened {
  training?: InferenceSession;
  evaluation?: InferenceSession;
  updating?: InferenceSession;
  step?: InferenceSession;
  segments?: Segments | undefined;
}

async function free(opened: Opened): Promise<void> {
  for (const each of Object.values(opened)) await each?.release();
}

export class TrainingSession {
  readonly trainingInputNames: readonly string[];
  readonly trainingOutputNames: readonly string[];
  readonly evalInputNames: readonly string[];
  readonly evalOutputNames: readonly string[];
  readonly #manifest: Manifest;
  readonly #training: Model | undefined;
  readonly #evaluation: Model | undefined;
  readonly #optimizer: Optimizer | undefined;
  readonly #resident: ResidentStep | undefined;
  readonly #skipping: Skipping;
  readonly #reset = Uint8Array.of(1); // whether the next step replaces the gradients
  #schedule: { schedule: Schedule; initialRate: number } | undefined;
  #pending = 0; // batches since the last reset, of `trainBatch`
  #loss = NaN; // of the last step that read it
  #running: Promise<unknown> | undefined;
  #released: Promise<void> | undefined;

  /** @param ort ONNX Runtime, as it was passed in or imported. */
  private constructor(
    readonly ort: OnnxRuntime, readonly state: CheckpointState,
    private readonly source: TrainingPackage, private readonly opened: Opened,
    onNotFinite: 'skip' | 'stop', loss: LossReading | undefined,
  ) {
    const manifest = (this.#manifest = source.manifest);
    const { training, evaluation, updating, step, segments } = opened;
    this.trainingInputNames = manifest.inputs.map(({ name }) => name);
    this.trainingOutputNames = manifest.outputs.map(({ name }) => name);
    this.evalInputNames = evaluation ? this.trainingInputNames : [];
    this.evalOutputNames = evaluation ? evaluationOutputs(manifest).map(({ name }) => name) : [];
    if (!segments && training) checkModel(manifest, training, this.trainingOutputNames, true);
    if (!segments && evaluation) checkModel(manifest, evaluation, this.evalOutputNames, false);
    state.requireIdle(); // another session may be at work on it
    const flat = place(manifest, state);
    const [parameters, memory, feeds]: [Feeds, Feeds, Feeds] = [byName(), byName(), byName()];
    for (const { name, dtype, dims, data, grad } of state.parameters.values()) {
      feeds[name] = parameters[name] = tensorOver(ort, dtype, data, dims);
      if (grad) {
        feeds[name + BUFFER] = tensorOver(ort, dtype, grad, dims);
        memory[name + GRADIENT] = feeds[name + BUFFER]!;
      }
    }
    for (const { name, role } of manifest.parameters) {
      if (role === 'state') memory[`${name}.update.out`] = parameters[name]!;
    }
    const reset = tensorOver(ort, 'bool', this.#reset, [1]);
    if (flat.layout.slots.length) feeds['lazy_reset_grad'] = reset;
    this.#skipping = new Skipping(manifest, state, flat, this.#reset, onNotFinite === 'stop');
    const [inputs, outputs] = [this.trainingInputNames, this.trainingOutputNames];
    this.#training = training &&
      new Network(ort, training, inputs, outputs, feeds, memory, true, segments);
    // On a GPU parameters are given anew each time.
    const given = step ? [...inputs, ...Object.keys(parameters)] : inputs;
    const evaluated = this.evalOutputNames;
    this.#evaluation = evaluation &&
      new Network(ort, evaluation, given, evaluated, parameters, byName(), false, segments);
    this.#optimizer = updating && new Optimizer(ort, updating, manifest, state, flat);
    this.#resident = step &&
      new ResidentStep(ort, step, manifest, this.#optimizer!, this.#skipping, state, loss!);
  }

  /** Open the models of a package on a state; sessions that share a state share the parameters. */
  static async create(
    files: PackageFiles | TrainingFiles, options: SessionOptions = {},
  ): Promise<TrainingSession> {
    const {
      ort = await importRuntime(), trusted, onNotFinite = 'skip', loss, ...overrides
    } = options;
    demand(onNotFinite === 'skip' || onNotFinite === 'stop', 'bad-policy',
      `onNotFinite is 'skip' or 'stop', not '${String(onNotFinite).slice(0, 40)}'.`, '',
      'leave it out to skip such batches and count them');
    const { opened, format, models } = await resolve(files);
    const { manifest } = opened;
    const usual = sessionOptions(manifest, ort, overrides);
    const others = otherProviders(ort, usual);
    if (others.length && !trusted) {
      const { requireRight } = await import('./check.js'); // which trains with sessions of this
      await requireRight(opened, ort, options, others);
    }
    const source = files.checkpointState;
    const state =
      source instanceof CheckpointState ? source
      : source !== undefined ? await CheckpointState.load(source)
      : await ownCheckpoint(opened);
    checkParameters(manifest, state);
    demand(!state.device, 'unsupported-device',
      'The state lives on a GPU already, in another session.', '', 'release that session first');
    if (loss !== undefined) requireResident(manifest, loss);
    const open = async (name: ModelName): Promise<InferenceSession> =>
      openSession(ort, await opened.model(name, format), name, usual);
    const own: Opened = {};
    try {
      if (loss === undefined) own.training = await open('training_model');
      if (models.has('eval_model')) own.evaluation = await open('eval_model');
      if (models.has('optimizer_model')) own.updating = await open('optimizer_model');
      if (loss !== undefined && own.updating) own.step = await openStepModel(ort, opened, usual);
      own.segments = manifest.segments && own.training &&
        (await Segments.open(ort, opened, manifest.segments, usual));
      // As of now: others may have used it while models were opened.
      const { flat, optimizer, device } = state;
      try {
        return new TrainingSession(ort, state, opened, own, onNotFinite, loss);
      } catch (error) {
        // Values stay where they were put: the next session moves them. Moments that were placed
        // for the first time are nowhere else.
        Object.assign(state, { flat, device }, (flat || !optimizer) && { optimizer });
        throw error;
      }
    } catch (error) {
      await free(own);
      throw error;
    }
  }

  /** Batches that make one optimizer step: the models divide the gradient of each by it. */
  get accumulationSteps(): number {
    return this.#manifest.accumulation_steps;
  }

  /** Training steps that were skipped because their loss or a gradient was not finite. */
  get skippedSteps(): number {
    return this.#skipping.count;
  }

  /** The last of them; undefined if there was none. */
  get lastNotFinite(): NotFinite | undefined {
    return this.#skipping.last;
  }

  /** Optimizer steps made, those before a resumed checkpoint included. */
  get stepCount(): number {
    return this.#updating().stepCount;
  }

  /**
   * Compute the loss of a batch and add its gradients to the accumulated ones.
   *
   * If the loss or a gradient is not finite, everything is as it was before: `skippedSteps`.
   *
   * @returns The loss and the additional outputs by name; with `fetches`, those that it names.
   */
  async runTrainStep(feeds: Batch, ...rest: RunArguments): Promise<Feeds> {
    return this.#use(() => this.#train(feeds, rest));
  }

  /** Compute loss and outputs in inference mode. */
  async runEvalStep(feeds: Batch, ...rest: RunArguments): Promise<Feeds> {
    return this.#use(async () => {
      const model = this.#evaluation ??
        fail('no-eval-model', 'The session has no evaluation model.', '', 'pass evalModel');
      Object.assign(model.feeds, await this.#resident?.parameters());
      return this.#run(model, this.evalOutputNames, feeds, rest);
    });
  }

  /** Change the parameters by the accumulated gradients, which remain as they are. */
  async runOptimizerStep(options?: RunOptions): Promise<void> {
    await this.#use(() => this.#update(options));
  }

  /** Let the next training step replace the accumulated gradients instead of adding to them. */
  async lazyResetGrad(): Promise<void> {
    await this.#use(async () => this.#resetNext());
  }

  #resetNext(): void {
    this.#reset[0] = 1;
    this.#pending = 0;
  }

  /**
   * A training step, an optimizer step and a lazy reset on one batch.
   *
   * @returns As `runTrainStep`.
   * @throws OdtpackError `step-of-several` if `accumulationSteps` is not 1.
   */
  async stepOn(feeds: Batch, options?: RunOptions): Promise<Feeds> {
    return this.#use(async () => {
      const steps = this.accumulationSteps;
      demand(steps === 1, 'step-of-several',
        `A step of this package takes ${steps} batches, and each gradient is divided `
        + 'by so many: one batch makes no step.', '', 'call trainBatch for each batch');
      return this.#step(feeds, options);
    });
  }

  async #step(feeds: Batch, options?: RunOptions): Promise<Feeds> {
    this.#updating().requireOwn();
    if (this.#resident) {
      return this.#run(this.#resident, this.trainingOutputNames, feeds, [options]);
    }
    const results = await this.#train(feeds, [options]);
    await this.#update(options);
    this.#resetNext();
    return results;
  }

  /**
   * One batch of a whole training: a training step, and after every `accumulationSteps` of them an
   * optimizer step, the schedule's step and a lazy reset.
   *
   * @returns The loss, or the one that was last read, where not every one is.
   */
  async trainBatch(feeds: Batch, options?: RunOptions): Promise<number> {
    return this.#use(async () => {
      this.#updating().requireOwn();
      const before = this.stepCount;
      const single = this.accumulationSteps === 1;
      try {
        const results = await (single ? this.#step(feeds, options) : this.#train(feeds, [options]));
        if (!single && ++this.#pending >= this.accumulationSteps) {
          this.#pending = 0;
          await this.#update(options);
          this.#resetNext();
        }
        if (Object.keys(results).length) this.#loss = lossOf(this.#manifest, results);
        return this.#loss;
      } finally {
        if (this.#schedule && this.stepCount !== before) this.#followSchedule();
      }
    });
  }

  /**
   * Train on batches, as long as `isActive` says so, which is asked before each.
   *
   * @returns The number of batches; the session is as after the last one.
   */
  async fit(
    batches: Iterable<Batch> | AsyncIterable<Batch>, isActive: () => boolean = () => true,
  ): Promise<number> {
    requireBatches(batches);
    requireArgument(typeof isActive === 'function', 'Whether to go on is asked of a function.');
    let count = 0;
    if (!isActive()) return count;
    for await (const batch of batches) {
      await this.trainBatch(batch);
      count += 1;
      if (!isActive()) break;
    }
    return count;
  }

  /** Additional outputs of samples whose labels or targets are not known. */
  async predict(feeds: Batch): Promise<Feeds> {
    const [, ...names] = this.evalOutputNames; // the first is the loss
    return this.runEvalStep(withoutAnswers(this.ort, this.#manifest.inputs, batchOf(feeds)), names);
  }

  /** Mean loss and accuracy over batches, weighted by their samples. */
  async evaluate(batches: Iterable<Batch> | AsyncIterable<Batch>): Promise<Evaluation> {
    requireBatches(batches);
    const manifest = this.#manifest;
    let [loss, samples, right, counted] = [0, 0, 0, 0];
    for await (const feeds of batches) {
      const results = await this.runEvalStep(feeds);
      // As Python counts: along the first input that has an axis.
      const sizes = manifest.inputs.map(({ name }) => feeds[name]?.dims[0]);
      const size = sizes.find((each) => each !== undefined) ?? 1;
      loss += Number(lossOf(manifest, results)) * size;
      samples += size;
      const classes = countRight(manifest, feeds, results);
      right += classes?.right ?? 0;
      counted += classes?.counted ?? 0;
    }
    if (samples === 0) fail('empty-batch', 'There is no batch to evaluate.');
    return { loss: loss / samples, samples, accuracy: counted ? right / counted : undefined };
  }

  /** The loss as a number, of what a step returned. */
  lossOf(results: Feeds): number {
    return lossOf(this.#manifest, results);
  }

  getLearningRate(): number {
    return this.#updating().learningRate;
  }

  setLearningRate(rate: number): void {
    this.#requireReady();
    this.#updating().learningRate = rate;
  }

  /** Warm up linearly to `initialRate`, then go linearly to 0; call `schedulerStep` per step. */
  registerLinearLRScheduler(warmupSteps: number, totalSteps: number, initialRate: number): void {
    this.setSchedule('linear', initialRate, { warmup_steps: warmupSteps, total_steps: totalSteps });
  }

  /** Let the rate follow a schedule, which is saved with the state. */
  setSchedule(kind: ScheduleKind, initialRate: number, settings: Settings = {}): void {
    const schedule = makeSchedule(kind, settings);
    this.#updating().checkRate(initialRate); // the factor may be 0
    this.setLearningRate(initialRate * schedule.factor(this.stepCount));
    this.#schedule = { schedule, initialRate };
    this.state.properties.set(SCHEDULE_PROPERTY, scheduleText(schedule, initialRate));
  }

  /**
   * Follow the schedule that the package proposes, over these steps if it does not say over how
   * many; false if it proposes none.
   */
  useProposedSchedule(totalSteps: number): boolean {
    this.#requireReady();
    const { schedule } = this.#manifest;
    if (!schedule) return false;
    const { kind, learning_rate: rate = DEFAULT_LEARNING_RATE } = schedule;
    this.setSchedule(kind as ScheduleKind, rate, ending(schedule, totalSteps));
    return true;
  }

  /** Go on with the schedule that the state was saved with; false if there is none. */
  restoreSchedule(): boolean {
    this.#requireReady();
    const text = this.state.properties.get(SCHEDULE_PROPERTY);
    if (text === undefined) return false;
    this.#schedule = readScheduleText(String(text));
    this.schedulerStep();
    return true;
  }

  /** Set the rate of the next optimizer step by the schedule. */
  schedulerStep(): void {
    this.#requireReady();
    this.#followSchedule();
  }

  #followSchedule(): void {
    const { schedule, initialRate } = this.#schedule ??
      fail('bad-schedule', 'There is no schedule.', '', 'call setSchedule first');
    this.#updating().learningRate = initialRate * schedule.factor(this.stepCount);
  }

  /** Number of elements of the trainable parameters, or of all. */
  async getParametersSize(trainableOnly = true): Promise<number> {
    return this.#use(async () => this.#size(trainableOnly));
  }

  #size(trainableOnly: boolean): number {
    return this.#inOrder(trainableOnly).reduce((sum, { dims }) => sum + product(dims), 0);
  }

  /** A copy of the parameters as one vector, in the order of the training model's inputs. */
  async getContiguousParameters(trainableOnly = true): Promise<Tensor> {
    return this.#use(async () => {
      await this.state.refresh();
      this.state.requireValues();
      const { dtype } = this.#manifest.layout;
      const size = this.#size(trainableOnly);
      const values = new ARRAYS[dtype](size);
      let at = 0;
      for (const own of this.#inOrder(trainableOnly)) {
        requireFits(own.dtype, dtype);
        values.set(converted(own, dtype) as Float32Array, at);
        at += own.data.length;
      }
      return tensorOver(this.ort, dtype, values, [size]);
    });
  }

  /** Set the parameters to what `getContiguousParameters` returned; nothing is changed on error. */
  async loadParametersBuffer(
    buffer: Uint8Array | Float32Array | Float64Array | Tensor, trainableOnly = true,
  ): Promise<void> {
    await this.#use(async () => {
      await this.state.refresh();
      const { dtype } = this.#manifest.layout;
      if (trainableOnly) this.state.requireValues('frozen parameters would remain without values');
      const given = (ArrayBuffer.isView(buffer) ? buffer : buffer?.data) as TypedArray;
      demand(given instanceof Uint8Array || given instanceof ARRAYS[dtype], 'buffer-type',
        `Parameters are set from bytes or an array of ${dtype}.`);
      const nbytes = this.#size(trainableOnly) * ARRAYS[dtype].BYTES_PER_ELEMENT;
      demand(given.byteLength === nbytes, 'buffer-size',
        `The buffer has ${given.byteLength} bytes, and the parameters have ${nbytes}.`,
        '', `pass trainableOnly = ${!trainableOnly} if it holds the others`);
      const parameters = this.#inOrder(trainableOnly);
      for (const parameter of parameters) requireFits(parameter.dtype, dtype);
      const values = new ARRAYS[dtype](Uint8Array.from(bytesOf(given)).buffer);
      let at = 0;
      // All are converted before the first is set: a value out of range changes nothing.
      const parts = parameters.map(({ dtype: own, data }) =>
        converted({ dtype, data: values.subarray(at, (at += data.length)) }, own));
      parameters.forEach(({ data }, i) => (data as Float32Array).set(parts[i] as Float32Array));
      this.state.complete();
    });
  }

  /** The bytes of an ONNX model for inference with the current parameters inside. */
  async inferenceModel(outputNames?: readonly string[]): Promise<Uint8Array> {
    return this.#use(async () => join(await this.#inferenceParts(outputNames)));
  }

  /** Write that model to a file, whole or not at all (Node). */
  async exportModelForInference(
    path: string | URL, outputNames?: readonly string[],
  ): Promise<void> {
    await this.#use(async () => {
      await platform.writeFile(path, await this.#inferenceParts(outputNames));
    });
  }

  /** Save the state, with the optimizer's: see `CheckpointState.save`. */
  async saveCheckpoint(
    target: Parameters<CheckpointState['save']>[0], includeOptimizerState = true,
    options?: SaveOptions,
  ): Promise<void> {
    await this.#use(async () => {
      if (includeOptimizerState) this.#optimizer?.requireOwn();
      await this.state.save(target, includeOptimizerState, options);
    }, false);
  }

  /**
   * Close the session: the call that runs is waited for, then the models are freed. Every call
   * after it is the error `closed`, but for another of this; the state remains.
   */
  release(): Promise<void> {
    return (this.#released ??= this.#free());
  }

  async #free(): Promise<void> {
    await this.#running?.catch(() => undefined); // which its caller gets
    await this.#resident?.release(this.state);
    await free(this.opened);
  }

  #requireReady(): void {
    if (this.#released) fail('closed', 'The session is closed.', '', 'make a new one');
    this.state.requireIdle();
  }

  /** One call at a time, and none once the session is closed. */
  async #use<T>(work: () => Promise<T>, alone = true): Promise<T> {
    this.#requireReady();
    const running = alone ? this.state.alone(work) : work();
    this.#running = running;
    return running;
  }

  /** A training step that leaves everything as it was if its loss or gradients are not finite. */
  async #train(feeds: Batch, rest: RunArguments): Promise<Feeds> {
    const skipping = this.#skipping;
    const step = (this.#optimizer?.stepCount ?? 0) + 1;
    return this.#run(this.#whole(), this.trainingOutputNames, feeds, rest, async (run) => {
      if (this.state.flat!.spoiled && !this.#reset[0]) this.#resetNext(); // by another session
      skipping.before();
      let results: Feeds;
      try {
        results = await run();
      } catch (error) {
        skipping.putBack();
        throw error;
      }
      skipping.after(this.lossOf(results), step);
      return results;
    });
  }

  async #update(options?: RunOptions): Promise<void> {
    this.state.requireValues();
    const optimizer = this.#updating();
    optimizer.requireOwn();
    this.#whole();
    if (!this.state.flat!.spoiled) await optimizer.step(options);
  }

  /** Parts of a step are made by the training model, which a training on a GPU does not open. */
  #whole(): Model {
    return this.#training ?? fail('unsupported-device', 'Steps on a GPU are not made in parts.', '',
      'call stepOn, trainBatch or fit, or leave the option `loss` out');
  }

  async #inferenceParts(outputNames?: readonly string[]): Promise<Uint8Array[]> {
    this.state.requireValues();
    await this.state.refresh();
    demand(!this.#manifest.segments, 'segments-unsupported',
      'A package of segments holds no model for inference.', '',
      'use saveAdapter, or odtpack adapter export PACKAGE --checkpoint FILE');
    const template = this.#manifest.files.inference_template ??
      fail('no-outputs', 'The model has no output but its loss: there is nothing to export.');
    const model = await this.source.file(template);
    return inferenceModel(this.#manifest, model, this.state, outputNames);
  }

  async #run(
    graph: Model, outputs: readonly string[], given: Batch, [first, second]: RunArguments,
    within: (run: () => Promise<Feeds>) => Promise<Feeds> = (run) => run(),
  ): Promise<Feeds> {
    this.state.requireValues();
    const feeds = batchOf(given);
    checkBatch(this.#manifest.inputs, feeds, this.ort);
    const fetches = isFetches(first, outputs) ? first : undefined;
    const options = fetches ? second : (first as RunOptions);
    const named = Array.isArray(fetches) ? fetches : Object.keys(fetches ?? {});
    const unknown = named.find((name) => !outputs.includes(name));
    if (unknown !== undefined) fail('unknown-output', `The model has no output '${unknown}'.`);
    demand(Array.isArray(fetches) || Object.values(fetches ?? {}).every((value) => value === null),
      'output-type', 'Outputs are new tensors: pass their names, or null.');
    Object.assign(graph.feeds, feeds);
    const results = await within(() => graph.run(options));
    const wanted = fetches ? named : outputs;
    const made = wanted.filter((name) => Object.hasOwn(results, name)); // a loss may stay on a GPU
    return byName(made.map((name) => [name, results[name]!] as const));
  }

  #updating(): Optimizer {
    return this.#optimizer ?? fail('no-optimizer-model', 'The session has no optimizer model.', '',
      'pass optimizerModel');
  }

  #inOrder(trainableOnly: boolean): Stored[] {
    return this.#manifest.parameters
      .filter(({ role }) => role === 'trainable' || !trainableOnly)
      .map(({ name }) => this.state.parameters.get(name)!);
  }
}

function requireBatches(batches: unknown): void {
  requireArgument(isIterable(batches) || (isRecord(batches) && Symbol.asyncIterator in batches),
    'Batches are given as a list, or as what can be iterated.', 'pass [batch] for one batch');
}
