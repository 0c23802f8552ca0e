/** What a session is opened from: a package's files, and a checkpoint that goes with them. */
import type { InferenceSession } from 'onnxruntime-common';
import { platform } from '#platform';
import { CheckpointState, type FlatState } from './checkpoint.js';
import { readCheckpoint } from './checkpoint_format.js';
import { attempt, demand, fail, requireArgument } from './errors.js';
import { type Manifest, trainedParameters } from './manifest.js';
import { type ModelName, type PackageSource, TrainingPackage } from './package.js';
import { type FileSource, inMemory, type OnnxRuntime } from './platform.js';
import { BUFFER, GRADIENT } from './runtime.js';
import { allocating, ARRAYS, bytesOf, type Layout, product, sameDims, view } from './tensors.js';

/** Files of one package by path or address, as onnxruntime-training took them. */
export interface TrainingFiles {
  checkpointState: CheckpointState | FileSource;
  trainModel: string;
  evalModel?: string;
  optimizerModel?: string;
}

/** A package, opened or not, and what to start from: its own checkpoint if nothing is given. */
export interface PackageFiles {
  package: TrainingPackage | PackageSource;
  checkpointState?: CheckpointState | FileSource;
  /** Which of the package's models to run; `onnx` by default. */
  format?: 'onnx' | 'ort';
}

/** The usual module of ONNX Runtime for this platform. */
export async function importRuntime(): Promise<OnnxRuntime> {
  const what = 'ONNX Runtime cannot be imported';
  return attempt(platform.importRuntime, 'onnxruntime-missing', what, '',
    'npm install onnxruntime-node or onnxruntime-web, or pass the module as the option `ort`');
}

export async function resolve(files: PackageFiles | TrainingFiles): Promise<{
  opened: TrainingPackage; format: 'onnx' | 'ort'; models: Set<ModelName>;
}> {
  const { package: given, format: asked, trainModel, evalModel, optimizerModel } =
    { ...files } as Partial<PackageFiles & TrainingFiles>;
  if (given !== undefined) {
    const opened = given instanceof TrainingPackage ? given : await TrainingPackage.open(given);
    const models = new Set<ModelName>(['eval_model', 'optimizer_model']);
    return { opened, format: asked ?? 'onnx', models };
  }
  requireArgument(typeof trainModel === 'string',
    'A session is created from { package }, or from { checkpointState, trainModel }.');
  const cut = Math.max(trainModel.lastIndexOf('/'), trainModel.lastIndexOf('\\')) + 1;
  const folder = trainModel.slice(0, cut);
  const opened = await TrainingPackage.open(folder || '.', { verify: 'used' });
  const format = trainModel.endsWith('.ort') ? 'ort' : 'onnx';
  const models = new Set<ModelName>();
  const paths =
    { training_model: trainModel, eval_model: evalModel, optimizer_model: optimizerModel };
  for (const [name, path] of Object.entries(paths) as [ModelName, string | undefined][]) {
    if (path === undefined) continue;
    const own = folder + opened.modelEntry(name, format).path;
    demand(platform.addressOf(path) === platform.addressOf(own), 'model-not-found',
      `${path} is not the ${name} of the package.`, path,
      'all models are those of the package in whose folder trainModel lies');
    models.add(name);
  }
  return { opened, format, models };
}

export async function ownCheckpoint(opened: TrainingPackage): Promise<CheckpointState> {
  const { checkpoint, checkpoint_data: data } = opened.manifest.files;
  const bytes = inMemory(await opened.file(checkpoint));
  const external = data && inMemory(await opened.file(data));
  return new CheckpointState(await readCheckpoint({
    where: checkpoint.path, bytes, close: () => undefined,
    ...(external && { data: () => external }),
  }));
}

/** Check that a model takes what it will be given, and returns what the manifest says. */
export function checkModel(
  manifest: Manifest, session: InferenceSession, outputs: readonly string[], trains: boolean,
): void {
  const given = new Set([...manifest.inputs, ...manifest.parameters].map(({ name }) => name));
  const [made, wanted] = [new Set(session.outputNames), [...outputs]];
  for (const { name, role } of trains ? manifest.parameters : []) {
    if (role === 'trainable') {
      given.add(name + BUFFER).add('lazy_reset_grad');
      wanted.push(name + GRADIENT);
    }
    if (role === 'state') wanted.push(`${name}.update.out`);
  }
  const odd = wanted.find((name) => !made.has(name)) ??
    session.inputNames.find((name) => !given.has(name));
  if (odd !== undefined) mismatch(`the models and the manifest do not agree on '${odd}'`);
}

/** Check that the checkpoint holds the parameters of the package and no others. */
export function checkParameters(manifest: Manifest, state: CheckpointState): void {
  const left = new Set(state.parameters.keys());
  if (!manifest.layout) mismatch('the manifest does not say where parameters lie');
  for (const { name, dtype, shape, role } of manifest.parameters) {
    const own = state.parameters.get(name);
    const shapeless = state.isNominal && !state.flat;
    left.delete(name);
    if (
      !own || own.dtype !== dtype || own.requiresGrad !== (role === 'trainable') ||
      (own.requiresGrad && dtype !== manifest.layout.dtype) ||
      !(shapeless || sameDims(own.dims, shape))
    ) {
      const problem = own ? 'of another shape, type or role' : 'missing';
      mismatch(`'${name}' is ${problem} in the checkpoint`);
    }
  }
  if (left.size) mismatch(`the models have no parameter '${[...left][0]}'`);
}

function mismatch(problem: string): never {
  fail('model-mismatch',
    `The package does not go with the checkpoint: ${problem}.`, '',
    'use the models and the checkpoint of one package, written by one odtpack build');
}

/** Move the parameters to where the package wants them; a state that was placed stays. */
export function place(manifest: Manifest, state: CheckpointState): FlatState {
  const { dtype, elements } = manifest.layout;
  const itemsize = ARRAYS[dtype].BYTES_PER_ELEMENT;
  const slots = trainedParameters(manifest).map(({ name, shape, offset }) => {
    const nbytes = product(shape) * itemsize;
    return { name, dtype, dims: shape, offset: offset * itemsize, nbytes };
  });
  const layout: Layout = { slots, nbytes: elements * itemsize };
  if (state.flat) {
    if (JSON.stringify(state.flat.layout) !== JSON.stringify(layout)) {
      mismatch('the state belongs to a session whose package lays its parameters out differently');
    }
    return state.flat;
  }
  const [parameters, gradients] = allocating('model-mismatch', 'the parameters', () =>
    [layout, layout].map(({ nbytes }) => platform.allocate(nbytes)));
  const flat = { layout, parameters: parameters!, gradients: gradients!, spoiled: false };
  for (const { name, dims, offset, nbytes } of slots) {
    const own = state.parameters.get(name)!;
    const data = view(flat.parameters, dtype, offset, nbytes);
    if (!state.isNominal) bytesOf(data).set(bytesOf(own.data));
    Object.assign(own, { dims, data, grad: view(flat.gradients, dtype, offset, nbytes) });
  }
  for (const { name, role, shape, dtype: type } of manifest.parameters) {
    if (role === 'trainable' || !state.isNominal) continue;
    const data = allocating('model-mismatch', `'${name}'`, () => new ARRAYS[type](product(shape)));
    Object.assign(state.parameters.get(name)!, { dims: shape, data });
  }
  state.flat = flat;
  return flat;
}

