// usage: node memory.mjs KIT SMALL FILE: what comes of reading a checkpoint, and by how many bytes the
// process grew at most. A small file is read first: code and libraries do not count.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [root, small, file] = process.argv.slice(2);
const { CheckpointState } = await import(pathToFileURL(join(root, 'dist/index.js')));
const read = (path) => CheckpointState.load(path).then(({ parameters }) => parameters.size, ({ code }) => code);
await read(small);
const before = process.memoryUsage.rss();
const outcome = await read(file);
// The most that getrusage knows may be the parent's: a process inherits it.
const [, most] = /VmHWM:\s+(\d+) kB/.exec(readFileSync('/proc/self/status', 'utf8'));
console.log(JSON.stringify([outcome, most * 1024 - before]));
