/** Training steps whose loss or gradients are not finite: they leave everything as it was. */
import type { CheckpointState, FlatState } from './checkpoint.js';
import { fail } from './errors.js';
import { type Manifest, trainable } from './manifest.js';
import { bytesOf, view } from './tensors.js';

const MOST_NAMES = 10;
/** Begins the names of states that gradients that are not finite are to change. */
const LOSS_SCALE = 'mixed.';

/** Why a training step was skipped. */
export interface NotFinite {
  readonly code: 'loss-not-finite' | 'gradient-not-finite';
  /** The optimizer step that it would have been a part of. */
  readonly step: number;
  /** The first ten parameters whose gradients are not finite; none if it is the loss. */
  readonly parameters: readonly string[];
}

/** What a training step may have to put back. */
export class Skipping {
  count = 0;
  last: NotFinite | undefined;
  readonly #trained: readonly string[];
  readonly #statistics: readonly { readonly live: Uint8Array; readonly kept: Uint8Array }[];
  readonly #gradients: Float32Array | Float64Array;
  #keptGradients: Float32Array | Float64Array | undefined;

  /** @param resets Whether the next step replaces the gradients: what the model is fed. */
  constructor(
    manifest: Manifest, readonly state: CheckpointState, readonly flat: FlatState,
    readonly resets: Uint8Array, readonly stops: boolean,
  ) {
    this.#trained = trainable(manifest).map(({ name }) => name);
    const statistics = manifest.parameters.filter(({ name, role }) =>
      role === 'state' && !name.startsWith(LOSS_SCALE));
    this.#statistics = statistics.map(({ name }) => {
      const live = bytesOf(state.parameters.get(name)!.data);
      return { live, kept: new Uint8Array(live.length) };
    });
    const { dtype } = manifest.layout;
    this.#gradients = view(flat.gradients, dtype, 0, flat.layout.nbytes) as Float32Array;
  }

  /** Before a step: keep what it changes. Gradients that it replaces are of no more use. */
  before(): void {
    for (const { live, kept } of this.#statistics) kept.set(live);
    if (this.resets[0]) return;
    this.#keptGradients ??= this.#gradients.slice();
    this.#keptGradients.set(this.#gradients);
  }

  /** Undo a step that failed or is skipped. */
  putBack(): void {
    for (const { live, kept } of this.#statistics) live.set(kept);
    if (!this.resets[0]) return this.#gradients.set(this.#keptGradients!);
    this.#gradients.fill(0);
    this.flat.spoiled = true;
  }

  /** After a step, of which this is the loss: count it, or put everything back. */
  after(loss: number, step: number): void {
    const odd = Number.isFinite(loss) ? this.#oddGradients() : [];
    if (Number.isFinite(loss) && !odd.length) {
      this.resets[0] = 0;
      this.flat.spoiled = false;
      return;
    }
    this.putBack();
    this.report(loss, odd, step);
  }

  /** Count a step whose loss, or the gradients of some parameters, were not finite. */
  report(loss: number, parameters: readonly string[], step: number): void {
    const odd = parameters.slice(0, MOST_NAMES);
    this.count += 1;
    const code = odd.length ? 'gradient-not-finite' : 'loss-not-finite';
    this.last = { code, step, parameters: odd };
    if (!this.stops) return;
    const what = odd.length
      ? `The gradient of ${odd.join(', ')} is not finite` : `The loss is ${loss}`;
    fail(code, `${what} in step ${step}: everything is as it was before.`, '',
      'look for samples that are not finite, or take a lower learning rate');
  }

  #oddGradients(): string[] {
    if (Number.isFinite(sum(this.#gradients))) return [];
    return this.#trained.filter((name) =>
      !(this.state.parameters.get(name)!.grad as Float32Array).every(Number.isFinite));
  }
}

/**
 * The sum of a flat vector, which is finite only if each number is: in four parts, none of which
 * waits for another. The length is a multiple of 64 bytes, and so of four numbers.
 */
function sum(numbers: Float32Array | Float64Array): number {
  let [a, b, c, d] = [0, 0, 0, 0];
  for (let i = 0; i < numbers.length; i += 4) {
    a += numbers[i]!;
    b += numbers[i + 1]!;
    c += numbers[i + 2]!;
    d += numbers[i + 3]!;
  }
  return a + b + c + d;
}
