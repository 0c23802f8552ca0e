/** Take what was trained with one package to the next one. */
import { CheckpointState } from './checkpoint.js';
import { demand, requireArgument } from './errors.js';
import { isIterable } from './json.js';
import { SCHEDULE_PROPERTY } from './schedules.js';
import { bytesOf, sameDims } from './tensors.js';

/**
 * Bring trained parameters into the state of a newer package's checkpoint, before a session is
 * made of it. Everything else comes from the newer package; `fresh` is unchanged on an error.
 *
 * @param names Parameters to take over: those that were trained by default. Running statistics
 *   of batch normalization are trained as well and must be named.
 * @param optimizerState Also take over step count, learning rate, its schedule and moments; those
 *   of parameters that are not taken over are zero.
 */
export function carryOver(
  trained: CheckpointState, fresh: CheckpointState, names?: Iterable<string>, optimizerState = true,
): CheckpointState {
  requireArgument([trained, fresh].every((each) => each instanceof CheckpointState),
    'Parameters are carried over from a CheckpointState to another.');
  requireArgument(names == null || isIterable(names), 'Parameters are named in a list.');
  trained.requireIdle();
  fresh.requireIdle();
  demand(!fresh.flat, 'busy', 'A session is training this state.', '',
    'carry over before a session is made of it');
  demand(!trained.device, 'busy', 'The trained state lives on a GPU.', '',
    'release its session first');
  trained.requireValues();
  fresh.requireValues();
  const own = [...trained.parameters.values()].filter(({ requiresGrad }) => requiresGrad);
  const pairs = [...(names ?? own.map(({ name }) => name))].map((name) => {
    const [source, target] = [trained.parameters.get(name), fresh.parameters.get(name)];
    const alike = source?.dtype === target?.dtype;
    demand(source && target && alike && sameDims(source.dims, target.dims), 'carry-over-parameter',
      `The trained parameters do not go over: '${name}' is missing, or of another shape or type.`,
      '', 'odtpack diff OLD NEW says what goes over');
    return [source, target] as const;
  });
  const taken = new Set(pairs.map(([source]) => source.name));
  const old = optimizerState ? trained.optimizer : undefined;
  const moments: NonNullable<CheckpointState['optimizer']>['moments'] = new Map();
  for (const { name, requiresGrad, dims } of fresh.parameters.values()) {
    if (!requiresGrad || !old?.moments.size) continue;
    const kept = old.moments.get(name);
    demand(kept && sameDims(trained.parameters.get(name)!.dims, dims), 'carry-over-optimizer',
      `The optimizer's state does not go over: there is none for '${name}'.`, '',
      'carryOver(trained, fresh, names, false)');
    moments.set(name, kept.map((moment) => {
      const data = moment.data.slice();
      if (!taken.has(name)) bytesOf(data).fill(0);
      return { ...moment, data };
    }));
  }
  for (const [source, target] of pairs) bytesOf(target.data).set(bytesOf(source.data));
  for (const [name, value] of trained.properties.values) {
    if (optimizerState || name !== SCHEDULE_PROPERTY) fresh.properties.values.set(name, value);
  }
  fresh.optimizer = old && { ...old, moments, groups: [] };
  return fresh;
}
