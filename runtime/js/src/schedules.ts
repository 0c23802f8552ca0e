/** Schedules of the learning rate: the factor of the initial rate after so many steps. */
import { fail, reason } from './errors.js';
import { isRecord, parseStrictJson } from './json.js';
import type { Settings } from './manifest.js';

export type ScheduleKind = 'constant' | 'linear' | 'cosine' | 'step' | 'multistep';

/** `factor(s)` holds after `s` optimizer steps; all kinds warm up linearly. */
export interface Schedule {
  readonly kind: ScheduleKind;
  readonly settings: Settings;
  factor(step: number): number;
}

const KEYS: Record<ScheduleKind, Settings> = {
  constant: { warmup_steps: 0 },
  linear: { warmup_steps: 0, total_steps: 0 },
  cosine: { warmup_steps: 0, total_steps: 0, floor: 0 },
  step: { warmup_steps: 0, period: 0, gamma: 0.1 },
  multistep: { warmup_steps: 0, milestones: [], gamma: 0.1 },
};
const REAL = ['floor', 'gamma', 'initial_lr'];

function bad(problem: string): never {
  fail('bad-schedule', problem, '',
    "write for example {kind: 'cosine', settings: {warmup_steps: 100, total_steps: 1000}}");
}

/** Make a schedule; settings are those of Python's schedules, and may come from outside. */
export function makeSchedule(kind: unknown, given: Settings = {}): Schedule {
  const found = typeof kind === 'string' && Object.hasOwn(KEYS, kind);
  const known = found ? KEYS[kind as ScheduleKind] : undefined;
  if (!known) return bad(`There is no schedule ${String(JSON.stringify(kind)).slice(0, 40)}.`);
  const odd = Object.keys(given).find((key) => !Object.hasOwn(known, key));
  if (odd !== undefined) bad(`The schedule ${kind} has no setting '${odd.slice(0, 40)}'.`);
  const settings: Settings = { ...known, ...given };
  const whole = (value: unknown): boolean => Number.isSafeInteger(value) && (value as number) >= 0;
  const require = (key: string, good: boolean): void => {
    const found = (): string => String(JSON.stringify(settings[key])).slice(0, 40);
    if (!good) bad(`${key} of the ${kind} schedule cannot be ${found()}.`);
  };
  const {
    warmup_steps: warmup = 0, total_steps: total = 0, period = 0, gamma = 0.1, floor = 0,
  } = settings as Record<string, number>;
  require('warmup_steps', whole(warmup));
  if ('total_steps' in settings) {
    require('total_steps', whole(total) && total >= Math.max(warmup, 1));
  }
  if ('period' in settings) require('period', whole(period) && period > 0);
  const real = (value: unknown): boolean => typeof value === 'number';
  if ('gamma' in settings) require('gamma', real(gamma) && gamma > 0 && gamma <= 1);
  if ('floor' in settings) require('floor', real(floor) && floor >= 0 && floor <= 1);
  const milestones = (settings['milestones'] ?? []) as readonly number[];
  if ('milestones' in settings) {
    const listed = Array.isArray(milestones) && milestones.length > 0;
    const rising = (at: number, i: number): boolean => whole(at) && at >= (milestones[i - 1] ?? 0);
    require('milestones', listed && milestones.every(rising));
  }
  const after: Record<ScheduleKind, (s: number) => number> = {
    constant: () => 1,
    linear: (s) => (s >= total ? 0 : (total - s) / (total - warmup)),
    cosine: (s) => {
      const done = s >= total ? 1 : (s - warmup) / (total - warmup);
      return floor + ((1 - floor) * (1 + Math.cos(Math.PI * done))) / 2;
    },
    step: (s) => gamma ** Math.floor(s / period),
    multistep: (s) => gamma ** milestones.filter((at) => at <= s).length,
  };
  const name = kind as ScheduleKind;
  return { kind: name, settings, factor: (s) => (s < warmup ? s / warmup : after[name](s)) };
}

/** Check a schedule that a manifest proposes; where it ends may be left to the training. */
export function checkSchedule(
  { kind, settings }: { kind: string; settings: Settings }, fail: (problem: string) => never,
): void {
  const ends = ['linear', 'cosine'].includes(kind) && !Object.hasOwn(settings, 'total_steps');
  try {
    makeSchedule(kind, ends ? { ...settings, total_steps: 2 ** 31 } : settings);
  } catch (error) {
    fail(`schedule: ${reason(error)}`);
  }
}

/** The property `odtpack.schedule`: JSON with sorted keys, as Python writes it. */
export function scheduleText({ kind, settings }: Schedule, initialRate: number): string {
  const content: Record<string, unknown> = { ...settings, kind, initial_lr: initialRate };
  const parts = Object.keys(content).sort().map((key) => {
    const value = content[key];
    const written = REAL.includes(key)
      ? realText(value as number)
      : JSON.stringify(value).replaceAll(',', ', ');
    return `"${key}": ${written}`;
  });
  return `{${parts.join(', ')}}`;
}

export function readScheduleText(text: string): { schedule: Schedule; initialRate: number } {
  const invalid = (problem: string): never => bad(`The saved schedule is not one: ${problem}.`);
  const content = parseStrictJson(new TextEncoder().encode(text), invalid);
  if (!isRecord(content)) return invalid('it is not an object');
  const { kind, initial_lr: initialRate, ...settings } = content as Settings & { kind: unknown };
  if (!(typeof initialRate === 'number' && initialRate >= 0)) {
    bad('The saved schedule has no initial rate.');
  }
  return { schedule: makeSchedule(kind, settings), initialRate: initialRate as number };
}

/** A number as Python writes a float: with a point or an exponent. */
function realText(value: number): string {
  const [digits, exponent] = value.toExponential().split('e') as [string, string];
  const power = Number(exponent);
  if (value !== 0 && (power < -4 || power >= 16)) {
    return `${digits}e${power < 0 ? '-' : '+'}${String(Math.abs(power)).padStart(2, '0')}`;
  }
  const plain = String(value);
  return /[.e]/.test(plain) ? plain : `${plain}.0`;
}
