/** A training in a GPU's memory, of a package with a step model (onnxruntime-web/webgpu). */
import type { InferenceSession, Tensor } from 'onnxruntime-common';
import { lossOf } from './batch.js';
import type { CheckpointState, Resident } from './checkpoint.js';
import { attempt, fail } from './errors.js';
import type { Skipping } from './finite.js';
import { type Manifest, trainable } from './manifest.js';
import type { Optimizer } from './optimizer.js';
import type { TrainingPackage } from './package.js';
import type { OnnxRuntime } from './platform.js';
import { type Feeds, type Model, openSession, tensorOver } from './runtime.js';
import { byName, bytesOf, type Dims, type Stored, type TypedArray } from './tensors.js';

/** How often a step reads its loss back: at every step, at each so many, or never. */
export type LossReading = 'every' | number | false;

const [RATE, NUMBER, KEPT, END] =
  ['update.learning_rate', 'update.step', 'update.kept', '.update.out'] as const;
const [MAP_READ, COPY_SRC, COPY_DST, STORAGE] = [1, 4, 8, 128] as const;
const ALIGNMENT = 16; // of a buffer's size, as ONNX Runtime has it

/** A value that the model reads: its array, and the tensor that is fed. */
interface Cell {
  readonly data: TypedArray;
  readonly written: boolean;
  tensor: Tensor;
  release: () => void;
}

// A binding that is written may not be read in the same pass: what a step computes goes into new
// buffers, which take the place of those that it read.

export class ResidentStep implements Model, Resident {
  readonly feeds: Feeds = byName();
  readonly #cells = new Map<string, Cell>();
  readonly #every: number;
  #gpu: GPUDevice | undefined;
  #made = 0;
  #changed = true; // whether arrays, or buffers, may be newer than the others
  #ran = false;

  constructor(
    readonly ort: OnnxRuntime, readonly session: InferenceSession, readonly manifest: Manifest,
    readonly optimizer: Optimizer, readonly skipping: Skipping, state: CheckpointState,
    reading: LossReading,
  ) {
    this.#every = reading === 'every' ? 1 : reading || Infinity;
    const shapes = new Map(session.inputMetadata.map((each) => [each.name, each]));
    const add = (name: string, { dtype, dims, data }: Stored, written: boolean): void => {
      const known = shapes.get(name);
      const tensor = tensorOver(ort, dtype, data, known?.isTensor ? (known.shape as Dims) : dims);
      this.#cells.set(name, { data, written, tensor, release: () => undefined });
    };
    for (const { name, role } of manifest.parameters) {
      add(name, state.parameters.get(name)!, role !== 'frozen');
    }
    for (const [name, own] of state.optimizer!.moments) {
      own.forEach((each, i) => add(`${name}.${manifest.layout.state[i]!.name}`, each, true));
    }
    state.device = this;
  }

  /** What other models of the session are fed. */
  async parameters(): Promise<Feeds> {
    await this.#upload();
    return byName(this.manifest.parameters.map(({ name }) =>
      [name, this.#cells.get(name)!.tensor] as const));
  }

  async run(options?: InferenceSession.RunOptions): Promise<Feeds> {
    await this.#upload();
    const { ort, manifest, optimizer, feeds } = this;
    const { rates, step } = optimizer.next();
    for (const [name, { tensor }] of this.#cells) feeds[name] = tensor;
    feeds[RATE] = tensorOver(ort, 'float32', rates, [rates.length]);
    feeds[NUMBER] = tensorOver(ort, 'int64', step, [1]);
    const inputs = this.session.inputNames.map((name) => [name, feeds[name]!] as const);
    const isDue = this.#made % this.#every === 0;
    const names = this.session.outputNames;
    const updates = names.filter((name) => name.endsWith(END));
    const outputs = manifest.outputs.map(({ name }) => name);
    const wanted = isDue ? [...updates, ...outputs, KEPT] : updates;
    const results = (await attempt(() => this.session.run(byName(inputs), wanted, options),
      'run-failed', 'ONNX Runtime failed in the middle of a step', '',
      'the state is as before the step')) as Feeds;
    this.#made += 1;
    const loss = isDue ? lossOf(manifest, results) : 0;
    if (!Number.isFinite(loss)) {
      for (const name of updates) results[name]!.dispose();
      this.skipping.report(loss, [], optimizer.stepCount + 1);
      return results;
    }
    this.#ran = true;
    for (const name of updates) {
      this.#take(this.#cells.get(name.slice(0, -END.length))!, results[name]!);
    }
    optimizer.advance();
    const flags = isDue ? (results[KEPT]!.data as Uint8Array) : [];
    const odd = trainable(manifest).filter((_, i) => flags[i]).map(({ name }) => name);
    if (odd.length) this.skipping.report(loss, odd, optimizer.stepCount);
    return results;
  }

  #take(cell: Cell, made: Tensor): void {
    if (made.location === 'cpu') return bytesOf(cell.data).set(bytesOf(made.data as TypedArray));
    cell.release();
    cell.tensor = this.#over(cell, made.gpuBuffer as GPUBuffer);
    cell.release = () => made.dispose();
  }

  #over({ tensor: { type, dims } }: Cell, buffer: GPUBuffer): Tensor {
    const options = { dataType: type as 'float32', dims };
    return this.ort.Tensor.fromGpuBuffer(buffer as never, options) as unknown as Tensor;
  }

  /** Let buffers hold what was written to arrays. */
  async #upload(): Promise<void> {
    if (!this.#changed) return;
    this.#gpu ??= (await this.ort.env.webgpu.device) as unknown as GPUDevice;
    for (const cell of this.#cells.values()) {
      if (!onGpu(cell.tensor.type) || !cell.data.byteLength) continue;
      const size = Math.ceil(cell.data.byteLength / ALIGNMENT) * ALIGNMENT;
      const usage = STORAGE | COPY_SRC | COPY_DST;
      const buffer = this.#gpu.createBuffer({ size, usage, mappedAtCreation: true });
      new Uint8Array(buffer.getMappedRange()).set(bytesOf(cell.data));
      buffer.unmap();
      cell.release();
      cell.tensor = this.#over(cell, buffer);
      cell.release = () => buffer.destroy();
    }
    this.#changed = false;
  }

  async refresh(): Promise<void> {
    if (!this.#ran) return;
    const cells = [...this.#cells.values()].filter(({ written, tensor }) =>
      written && tensor.location === 'gpu-buffer');
    let size = 0;
    const places = cells.map(({ data, tensor }) => {
      const [at, nbytes] = [size, Math.ceil(data.byteLength / 4) * 4];
      size += nbytes;
      return { data, tensor, at, nbytes };
    });
    const staging = this.#gpu!.createBuffer({ size, usage: MAP_READ | COPY_DST });
    const encoder = this.#gpu!.createCommandEncoder();
    for (const { tensor, at, nbytes } of places) {
      encoder.copyBufferToBuffer(tensor.gpuBuffer as GPUBuffer, 0, staging, at, nbytes);
    }
    this.#gpu!.queue.submit([encoder.finish()]);
    await staging.mapAsync(MAP_READ);
    const bytes = new Uint8Array(staging.getMappedRange());
    for (const { data, at } of places) bytesOf(data).set(bytes.subarray(at, at + data.byteLength));
    staging.destroy();
    this.#ran = false;
  }

  wrote(): void {
    this.#changed = true;
  }

  async release(state: CheckpointState): Promise<void> {
    await this.refresh();
    for (const { release } of this.#cells.values()) release();
    state.device = undefined;
  }
}

/** The step model, whose parameters and moments come back as buffers of the GPU. */
export async function openStepModel(
  ort: OnnxRuntime, opened: TrainingPackage, options: InferenceSession.SessionOptions,
): Promise<InferenceSession> {
  const { layout, parameters } = opened.manifest;
  const written = parameters.filter(({ role }) => role !== 'frozen');
  const places = written.flatMap(({ name, role, dtype }) =>
    ['', ...(role === 'trainable' ? layout.state.map((each) => `.${each.name}`) : [])].map((end) =>
      [name + end + END, onGpu(dtype) ? 'gpu-buffer' : 'cpu'] as const));
  return openSession(ort, await opened.model('step_model'), 'step_model', {
    ...options, preferredOutputLocation: { ...byName(places) },
  });
}

/** Throw `unsupported-device` where a package cannot be trained so. */
export function requireResident(manifest: Manifest, reading: LossReading): void {
  if (reading !== 'every' && reading !== false && !(Number.isInteger(reading) && reading > 0)) {
    unsupported(`'loss' cannot be ${reading}`, "pass 'every', a whole number or false");
  }
  if (!manifest.files.step_model || manifest.accumulation_steps !== 1) {
    unsupported('it needs a package with a step model, of one batch each',
      'odtpack build --target webgpu --step-model always');
  }
}

function onGpu(dtype: string): boolean {
  return dtype === 'float32' || dtype === 'float16';
}

function unsupported(what: string, hint: string): never {
  fail('unsupported-device', `The session cannot train on a GPU: ${what}.`, '', hint);
}
