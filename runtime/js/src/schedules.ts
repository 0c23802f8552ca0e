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
const isWhole = (value: unknown): value is number =>
  Number.isSafeInteger(value) && Number(value) >= 0;
const isShare = (value: unknown): boolean => typeof value === 'number' && value >= 0 && value <= 1;
/** What a setting may be, beside those before it. */
const GOOD: Record<string, (value: unknown, settings: Settings) => boolean> = {
  warmup_steps: isWhole,
  total_steps: (value, { warmup_steps: warmup }) =>
    isWhole(value) && value >= Math.max(Number(warmup), 1),
  period: (value) => isWhole(value) && value > 0,
  gamma: (value) => isShare(value) && value !== 0,
  floor: isShare,
  milestones: (value) => Array.isArray(value) && value.length > 0 &&
    value.every((at, i) => isWhole(at) && at >= (value[i - 1] ?? 0)),
};
/** Of these something must say where they end. */
const ENDING = ['linear', 'cosine'];
const REAL = ['floor', 'gamma', 'initial_lr'];

function bad(problem: string): never {
  fail('bad-schedule', problem, '',
    "write for example {kind: 'cosine', settings: {warmup_steps: 100, total_steps: 1000}}");
}

function shown(value: unknown): string {
  const text = JSON.stringify(value, (_, each) => (typeof each === 'bigint' ? `${each}n` : each));
  return String(text).slice(0, 40);
}

/** Make a schedule; settings are those of Python's schedules, and may come from outside. */
export function makeSchedule(kind: unknown, given: Settings = {}): Schedule {
  const found = typeof kind === 'string' && Object.hasOwn(KEYS, kind);
  const known = found ? KEYS[kind as ScheduleKind] : undefined;
  if (!known) return bad(`There is no schedule ${shown(kind)}.`);
  if (!isRecord(given)) bad(`The settings of a schedule are an object, not ${shown(given)}.`);
  const odd = Object.keys(given).find((key) => !Object.hasOwn(known, key));
  if (odd !== undefined) bad(`The schedule ${kind} has no setting '${odd.slice(0, 40)}'.`);
  const settings: Settings = { ...known, ...given };
  for (const [key, value] of Object.entries(settings)) {
    if (GOOD[key]!(value, settings)) continue;
    bad(`${key} of the ${kind} schedule cannot be ${shown(value)}.`);
  }
  const { warmup_steps: warmup = 0, total_steps: total = 0, period = 0, gamma = 0, floor = 0 } =
    settings as Record<string, number>;
  const milestones = settings['milestones'] as readonly number[];
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

/** Settings that a manifest proposes, with where they end if that is left to the training. */
export function ending(
  { kind, settings }: { kind: string; settings: Settings }, total_steps: number,
): Settings {
  return ENDING.includes(kind) ? { total_steps, ...settings } : settings;
}

/** Check a schedule that a manifest proposes. */
export function checkSchedule(
  proposed: { kind: string; settings: Settings }, fail: (problem: string) => never,
): void {
  try {
    makeSchedule(proposed.kind, ending(proposed, 2 ** 31));
  } catch (error) {
    fail(`schedule: ${reason(error)}`);
  }
}

export const SCHEDULE_PROPERTY = 'odtpack.schedule';

/** That property: JSON with sorted keys, as Python writes it. */
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
