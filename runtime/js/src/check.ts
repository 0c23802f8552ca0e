/** Is training right here: on made-up data that the package describes. */
import { attempt, demand, fail } from './errors.js';
import { float16Bits } from './inference.js';
import type { SelfCheckInfo } from './manifest.js';
import { TrainingPackage, type PackageSource } from './package.js';
import type { OnnxRuntime } from './platform.js';
import { type Feeds, tensorOver } from './runtime.js';
import { type SessionOptions, TrainingSession } from './session.js';
import { allocating, ARRAYS, byName, type DType, product } from './tensors.js';

/**
 * Train five steps and compare the losses with those that the build found.
 *
 * @throws OdtpackError `self-check-failed`, or `no-self-check` if the package has none.
 */
export async function selfCheck(
  source: TrainingPackage | PackageSource, options: SessionOptions = {},
): Promise<void> {
  const opened = source instanceof TrainingPackage ? source : await TrainingPackage.open(source);
  const expected = opened.manifest.self_check;
  if (!expected || expected.reason !== undefined) {
    const why = expected?.reason ?? 'it was left out';
    return fail('no-self-check', `The package has no self-check: ${why}.`);
  }
  const known = new Map(opened.manifest.inputs.map(({ name, dtype }) => [name, dtype]));
  demand(expected.inputs.every(({ name }) => (known.get(name) ?? 'string') !== 'string'),
    'no-self-check', "The self-check's inputs are not those of the models.");
  const session = await TrainingSession.create({ package: opened }, options);
  try {
    const batch = madeUp(expected.inputs, known, session.ort);
    session.setLearningRate(expected.learning_rate!);
    const found: number[] = [];
    for (const _ of expected.losses) {
      if (session.accumulationSteps === 1) found.push(session.lossOf(await session.stepOn(batch)));
      else {
        found.push(session.lossOf(await session.runTrainStep(batch)));
        await session.runOptimizerStep();
        await session.lazyResetGrad();
      }
    }
    found.push(session.lossOf(await session.runEvalStep(batch)));
    for (const [i, wanted] of [...expected.losses, expected.evaluation_loss!].entries()) {
      if (Math.abs(found[i]! - wanted) <= expected.tolerances[i]!) continue;
      const step = i < expected.losses.length ? `of step ${i + 1}` : 'of the evaluation';
      fail('self-check-failed',
        `Training is not right here: the loss ${step} is ${found[i]}, and should be ${wanted}.`,
        '', 'report the version of ONNX Runtime, the provider and the processor');
    }
  } finally {
    await session.release();
  }
}

/** Accelerators have computed wrong gradients without an error: they train a few steps first. */
export async function requireRight(
  opened: TrainingPackage, ort: OnnxRuntime, options: SessionOptions, names: string[],
): Promise<void> {
  const adapter = await globalThis.navigator?.gpu?.requestAdapter().catch(() => null);
  const { vendor, architecture, device, description } = adapter?.info ?? {};
  const step = options.loss === undefined ? 'parts' : 'whole';
  const known = [opened.sha256, ort.env.versions.common, ...names, step, vendor, architecture,
    device, description].join(' ');
  if (remembered().includes(known)) return;
  const own: SessionOptions = { ...options, trusted: true };
  if (step === 'whole') own.loss = 'every';
  await attempt(() => selfCheck(opened, own), 'unsupported-device',
    `Training does not run right on ${names.join(', ')}`, '',
    'leave executionProviders out: the processor trains right');
  remember(known);
}

// What was found right before, by package, version and adapter: of this origin, in a browser.
const REMEMBERED = 'odtpack.right';
const MOST_REMEMBERED = 32;

function remembered(): string[] {
  try {
    const found: unknown = JSON.parse(globalThis.localStorage.getItem(REMEMBERED) ?? '[]');
    return Array.isArray(found) ? found.map(String) : [];
  } catch {
    return [];
  }
}

function remember(known: string): void {
  try {
    const all = [...remembered(), known].slice(-MOST_REMEMBERED);
    globalThis.localStorage.setItem(REMEMBERED, JSON.stringify(all));
  } catch {
    return; // without storage the check is made each time
  }
}

/** A batch of numbers that are the same everywhere. */
function madeUp(
  inputs: SelfCheckInfo['inputs'], dtypes: ReadonlyMap<string, string>, ort: OnnxRuntime,
): Feeds {
  const batch: Feeds = byName();
  let at = 0;
  for (const { name, shape, bound } of inputs) {
    const dtype = dtypes.get(name) as DType;
    const data = allocating('no-self-check', `'${name}'`, () => new ARRAYS[dtype](product(shape)));
    for (let i = 0; i < data.length; i++) {
      // 24 bits of a multiplicative hash of the counter.
      const bits = Math.imul(++at, 2654435761) >>> 8;
      const real = (bits - 8388608) / 8388608;
      if (dtype.startsWith('float')) data[i] = dtype === 'float16' ? float16Bits(real) : real;
      else if (dtype.endsWith('int64')) data[i] = BigInt(bits % (bound ?? 1));
      else data[i] = bits % (dtype === 'bool' ? 2 : (bound ?? 1));
    }
    batch[name] = tensorOver(ort, dtype, data, shape);
  }
  return batch;
}
