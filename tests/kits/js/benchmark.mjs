// usage: node benchmark.mjs KIT FOLDER: prints what the benchmark measured as JSON.
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [root, folder] = process.argv.slice(2);
const { benchmark } = await import(pathToFileURL(join(root, 'dist/index.js')));
console.log(JSON.stringify(await benchmark({ folder, memoryLimit: 500_000_000 })));
