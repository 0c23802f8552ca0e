// The kit's test program, compiled together with the kit's sources:
//
//     kit conformance VECTORS [NAME...]    runs conformance vectors
//     kit measure JOB.json                 trains, and prints losses and memory as JSON
//     kit hostile [FOLDER], kit read FOLDER               see Readers.cs
//     kit saves FILE EXTERNAL_ABOVE keep|replace          saves until it is killed
//     kit export FOLDER                    exports a model with the parameters of 1.ckpt as m.onnx
//     kit load FILE                        prints whether it is checked, and what was lost
//     kit keep FROM FILE EXTERNAL_ABOVE    saves over a file, which is kept
//     kit calls COMMAND JOB.json TIMES     see Calls.cs
//     kit former PACKAGE IMAGES LABELS FOLDER SHAPE...    see Former.cs
//     kit adapter PACKAGE TRAINED FILE     prints the adapter's parameters, carries them over, saves
//     kit adapters PACKAGE TRAINED TO FROM FILE           writes an adapter; reads one, and saves
//     kit decoder PACKAGE TRAINED ADAPTER... PROMPT       prints what follows; see Generate
//     kit signature PACKAGE right|wrong|throws            opens a package that must be signed
//     kit benchmark FOLDER THREADS [MEMORY_LIMIT_BYTES]
using System;
using System.Globalization;
using System.Linq;
using Odtpack;

static class Program {
    static int Main(string[] words) {
        CultureInfo.DefaultThreadCurrentCulture = CultureInfo.InvariantCulture;
        CultureInfo.CurrentCulture = CultureInfo.InvariantCulture;
        try {
            return Run(words);
        } catch (Exception error) when (error is OdtpackException || error is Failure) {
            Console.Error.WriteLine("error: " + error.Message);
            return 2;
        }
    }
    static int Run(string[] words) {
        switch (words[0]) {
            case "conformance": return Conformance.Run(words[1], words.Skip(2).ToList());
            case "measure": Measure.Run(words[1]); break;
            case "hostile":
                if (words.Length > 1) Readers.Hostile(words[1]);
                else Readers.Hostile();
                break;
            case "read": Readers.Read(words[1]); break;
            case "saves": SaveForever(words[1], ulong.Parse(words[2]), words[3] == "keep"); break;
            case "export": Export(words[1]); break;
            case "load":
                Refusing(words[1], state => {
                    Console.WriteLine(state.IsChecked ? "checked" : "unchecked");
                    Console.WriteLine(state.Recovered);
                });
                break;
            case "keep":
                Refusing(words[1], state =>
                    Internals.Save(state, words[2], true, ulong.Parse(words[3])));
                break;
            case "calls": Calls.Run(words[1], words[2], int.Parse(words[3])); break;
            case "former":
                Former.Run(
                    words[1], words[2], words[3], words[4],
                    words.Skip(5).Select(long.Parse).ToArray());
                break;
            case "adapter":
                using (var package = TrainingPackage.Open(words[1]))
                using (var state = CheckpointState.LoadCheckpoint(package.Path("checkpoint")))
                using (var trained = CheckpointState.LoadCheckpoint(words[2])) {
                    var names = package.Adapter.Select(each => each.Name).ToList();
                    Console.Write(string.Join("\n", names));
                    state.CarryOver(trained, names, false);
                    CheckpointState.SaveCheckpoint(state, words[3]);
                }
                break;
            case "adapters":
                using (var package = TrainingPackage.Open(words[1]))
                using (var state = CheckpointState.LoadCheckpoint(package.Path("checkpoint")))
                using (var trained = CheckpointState.LoadCheckpoint(words[2])) {
                    trained.SaveAdapter(package, words[3]);
                    state.LoadAdapter(package, words[4]);
                    CheckpointState.SaveCheckpoint(state, words[5]);
                }
                break;
            case "decoder": Generate(words.Skip(1).ToArray()); break;
            case "signature":
                TrainingPackage.Open(words[1], (manifest, signature) => {
                    if (words[2] == "throws") throw new InvalidOperationException("no key");
                    return signature.Length == 64 && manifest[0] == '{' && words[2] == "right";
                }).Dispose();
                break;
            case "benchmark":
                var limit = words.Length > 3 ? ulong.Parse(words[3]) : 0;
                Console.WriteLine(Device.Benchmark(words[1], int.Parse(words[2]), limit));
                break;
            default: throw new Failure("the head of Program.cs says how this program is used");
        }
        return 0;
    }

    /// Every save writes its number into a property and into every element of every parameter: a
    /// file that is whole holds one number.
    static void SaveForever(string path, ulong externalAbove, bool keepsPrevious) {
        using (var state = CheckpointState.LoadCheckpoint(path)) {
            for (var number = (long)state.GetProperty("number") + 1; ; ++number) {
                state.AddProperty("number", number);
                foreach (var name in state.ParameterNames) {
                    using (var value = state.GetParameter(name)) {
                        var all = Enumerable.Repeat((float)number, (int)value.Count);
                        value.CopyFrom(all.ToArray());
                    }
                }
                Internals.Save(state, path, keepsPrevious, externalAbove);
                Console.WriteLine(number);
            }
        }
    }
    /// A line for each adapter, for the state and for no adapter: tokens of a prompt such as 3,4,5,
    /// greedily, drawn, drawn of a few, and before the fourth; then the logits of the first.
    static void Generate(string[] words) {
        var prompt = words.Last().Split(',').Select(int.Parse).ToArray();
        using (var package = TrainingPackage.Open(words[0]))
        using (var state = CheckpointState.LoadCheckpoint(words[1]))
        using (var options = package.SessionOptions(1)) {
            var kept = Environment.GetEnvironmentVariable("ODTPACK_TEST_PACKED");
            if (kept != null) options.AddSessionConfigEntry("odtpack.packed_weights", kept);
            Generate(words, prompt, state, new Generator(package, 1, kept == null ? null : options));
        }
    }

    static void Generate(
        string[] words, int[] prompt, CheckpointState state, Generator generator) {
        using (generator) {
            var names = words.Skip(2).Take(words.Length - 3).ToList();
            foreach (var name in names) generator.AddAdapter(name, name);
            generator.AddAdapter("state", state);
            generator.AddAdapter("gone", state);
            generator.RemoveAdapter("gone");
            foreach (var name in names.Concat(new[] { "state", null })) {
                var plain = new GenerateOptions { Adapter = name, MaxTokens = 9 };
                var first = generator.Generate(prompt, plain).ToList();
                var turns = new[] {
                    new GenerateOptions { Temperature = 1.5, TopP = 0.95, Seed = 7 },
                    new GenerateOptions { Temperature = 1.5, TopK = 3, Seed = 8 },
                    new GenerateOptions { Stop = new[] { first[3] } }
                }.Select(options => {
                    options.Adapter = name;
                    options.MaxTokens = 9;
                    return generator.Generate(prompt, options);
                });
                Console.WriteLine(
                    string.Join(" ", first.Concat(turns.SelectMany(each => each)))
                    + " " + string.Join(" ", generator.Logits(prompt, name).Select(
                        each => each.ToString("R"))));
            }
            foreach (var options in new[] {
                new GenerateOptions { Adapter = "gone" }, new GenerateOptions { TopP = 0 }
            }) PrintCode(() => generator.Generate(prompt, options).ToList());
            PrintCode(() => generator.Generate(new[] { -1 }).ToList());
            PrintCode(() => generator.Generate(new[] { 3, 128 }).ToList());
        }
    }
    static void PrintCode(Action action) {
        try {
            action();
        } catch (OdtpackException error) {
            Console.WriteLine(error.Code);
        }
    }
    static void Export(string folder) {
        using (var package = TrainingPackage.Open(folder + "/package"))
        using (var state = CheckpointState.LoadCheckpoint(folder + "/1.ckpt"))
        using (var session = new TrainingSession(package, state, 1))
            session.ExportModelForInferencing(folder + "/m.onnx", new[] { "output" });
        Console.WriteLine(1);
    }
    static void Refusing(string path, Action<CheckpointState> work) {
        try {
            using (var state = CheckpointState.LoadCheckpoint(path)) work(state);
        } catch (OdtpackException error) {
            Console.WriteLine(error.Code + "\n" + error.Message);
        }
    }
}
