/** Training steps whose loss or gradients are not finite: they leave everything as it was. */
import type { CheckpointState, FlatState } from './checkpoint.js';
import { fail } from './errors.js';
import type { Manifest } from './manifest.js';
import { bytesOf, type TypedArray } from './tensors.js';

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
  readonly #gradients: Uint8Array;
  #keptGradients: Uint8Array | undefined;

  /** @param resets Whether the next step replaces the gradients: what the model is fed. */
  constructor(
    manifest: Manifest, readonly state: CheckpointState, readonly flat: FlatState,
    readonly resets: Uint8Array, readonly stops: boolean,
  ) {
    const names = (wanted: string): string[] =>
      manifest.parameters.filter(({ role }) => role === wanted).map(({ name }) => name);
    this.#trained = names('trainable');
    const statistics = names('state').filter((name) => !name.startsWith(LOSS_SCALE));
    this.#statistics = statistics.map((name) => {
      const live = bytesOf(state.parameters.get(name)!.data);
      return { live, kept: new Uint8Array(live.length) };
    });
    this.#gradients = new Uint8Array(flat.gradients, 0, flat.layout.nbytes);
  }

  /** Before a step: keep what it changes. Gradients that it replaces are of no more use. */
  before(): void {
    for (const { live, kept } of this.#statistics) kept.set(live);
    if (this.resets[0]) return;
    this.#keptGradients ??= new Uint8Array(this.#gradients.length);
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
    const what = odd.length ? `The gradient of ${odd.join(', ')} is not finite` : `The loss is ${loss}`;
    fail(code, `${what} in step ${step}: everything is as it was before.`, '',
      'look for samples that are not finite, or take a lower learning rate');
  }

  #oddGradients(): string[] {
    const gradient = (name: string): TypedArray => this.state.parameters.get(name)!.grad!;
    const wide = this.#trained.some((name) => gradient(name) instanceof Float64Array);
    if (allFinite(this.#gradients, wide)) return [];
    return this.#trained.filter((name) => !allFinite(bytesOf(gradient(name)), wide));
  }
}

/** Whether no element has only ones in its exponent. */
function allFinite(bytes: Uint8Array, wide: boolean): boolean {
  const words = new Uint32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
  const ones = wide ? 0x7ff00000 : 0x7f800000;
  const step = wide ? 2 : 1;
  for (let i = step - 1; i < words.length; i += step) {
    if ((words[i]! & ones) === ones) return false;
  }
  return true;
}
