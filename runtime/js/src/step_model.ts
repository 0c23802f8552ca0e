/** The step model: a training model that updates the parameters (docs/formats/package.md). */
import type { InferenceSession, Tensor } from 'onnxruntime-common';
import { type Manifest, trainedParameters } from './manifest.js';
import { mismatch } from './opening.js';
import type { Optimizer } from './optimizer.js';
import type { OnnxRuntime } from './platform.js';
import { type Feeds, Graph, tensorOver } from './runtime.js';
import { product, type Stored } from './tensors.js';

const UPDATED = '.update.out';

/** Whether the binding says which shapes a model takes: React Native's does from 1.24 on. */
export function tellsShapes(session: InferenceSession): boolean {
  try {
    return session.outputMetadata.length > 0;
  } catch {
    return false;
  }
}

/**
 * A step model on the memory of the parameters that it updates, and of what their optimizer keeps.
 * New values take the place of the old ones, in the shapes that the model has for them: it may cut
 * a matrix into parts.
 *
 * @param parameters All parameters of the state.
 * @param feeds The parameters as tensors.
 * @param memory Where the running statistics are written to.
 */
export function stepGraph(
  ort: OnnxRuntime, session: InferenceSession, manifest: Manifest,
  parameters: ReadonlyMap<string, Stored>, feeds: Feeds, memory: Feeds, optimizer: Optimizer,
): Graph {
  const kept = optimizer.kept();
  const left = new Map(kept);
  for (const { name } of trainedParameters(manifest)) left.set(name, parameters.get(name)!);
  const bind = ({ dtype, data }: Stored, value: InferenceSession.ValueMetadata): Tensor => {
    const dims = value.isTensor && value.type === dtype ? (value.shape as number[]) : [-1];
    // A symbol makes the product NaN, which equals nothing.
    if (product(dims) !== data.length) mismatch(`the step model has another '${value.name}'`);
    return tensorOver(ort, dtype, data, dims);
  };
  const given = new Map([...optimizer.scalars(), ...kept]);
  const inputs: Feeds = { ...feeds };
  const outputs: Feeds = { ...memory };
  for (const value of session.inputMetadata) {
    const own = given.get(value.name);
    if (own) inputs[value.name] = bind(own, value);
  }
  for (const value of session.outputMetadata) {
    const name = value.name.endsWith(UPDATED) ? value.name.slice(0, -UPDATED.length) : '';
    const own = left.get(name);
    if (own && left.delete(name)) outputs[value.name] = bind(own, value);
  }
  for (const name of left.keys()) mismatch(`the step model does not update '${name}'`);
  return new Graph(ort, session, inputs, outputs, manifest.outputs.map(({ name }) => name));
}
