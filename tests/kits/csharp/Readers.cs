// What the kit's readers make of hostile files, for the comparison with Python's.
//
// `hostile FOLDER` takes the cases of FOLDER/index.json and prints "NAME<TAB>ok" or
// "NAME<TAB>CODE"; `read FOLDER` takes every *.ckpt, with a digest of what it holds, and every
// *.json as a manifest. `hostile` alone reads from standard input lines "checkpoint PATH" or
// "package PATH", tries what an app would do with that, and prints for each "accepted" or "refused
// CODE". Nothing else may happen.
using System;
using System.IO;
using System.Linq;
using Odtpack;

static class Readers {
    static void Report(string name, Func<string> action) {
        string found;
        try {
            found = action();
        } catch (OdtpackException error) {
            found = error.Code;
        } catch (Exception error) {
            found = "foreign:" + error.GetType().Name;
        }
        Console.WriteLine(name + "\t" + found);
    }

    internal static void Hostile(string folder) {
        foreach (var each in Json.Read(folder + "/index.json")["cases"].List()) {
            Func<string, string> path = key => folder + "/" + each[key].Text();
            Report(each["name"].Text(), () => {
                var action = each["action"].Text();
                if (action == "checkpoint") {
                    CheckpointState.LoadCheckpoint(path("checkpoint")).Dispose();
                    return "ok";
                }
                using (var package = TrainingPackage.Open(path("package"))) {
                    if (action == "open") return "ok";
                    using (var state = CheckpointState.LoadCheckpoint(path("checkpoint")))
                    using (new TrainingSession(package, state, 1)) return "ok";
                }
            });
        }
    }
    internal static void Read(string folder) {
        var names = Directory.GetFiles(folder).Select(Path.GetFileName).ToArray();
        foreach (var name in names.OrderBy(each => each, StringComparer.Ordinal)) {
            var path = folder + "/" + name;
            if (name.EndsWith(".ckpt"))
                Report(name, () => {
                    using (var state = CheckpointState.LoadCheckpoint(path))
                        return "ok\t" + State.Digest(state);
                });
            if (name.EndsWith(".json"))
                Report(name, () => {
                    var bytes = File.ReadAllBytes(path);
                    Ort.Load();
                    Native.Call(Internals.odtpack_manifest_check(bytes, (UIntPtr)bytes.Length));
                    return "ok\t-";
                });
        }
    }

    internal static void Hostile() {
        for (string line; (line = Console.ReadLine()) != null;) {
            var parts = line.Split(new[] { ' ' }, 2);
            try {
                if (parts[0] == "checkpoint") {
                    using (var state = CheckpointState.LoadCheckpoint(parts[1]))
                        CheckpointState.SaveCheckpoint(state, parts[1] + ".again", true);
                } else {
                    Use(parts[1]);
                }
                Console.WriteLine("accepted");
            } catch (OdtpackException error) {
                Console.WriteLine("refused " + error.Code);
            }
        }
    }
    /// Open, load, and train a step on zeros, two samples wherever a size may vary.
    static void Use(string path) {
        using (var package = TrainingPackage.Open(path))
        using (var state = CheckpointState.LoadCheckpoint(package.Path("checkpoint")))
        using (var session = new TrainingSession(package, state, 1)) {
            var batch = package.Inputs.Select(spec => {
                var shape = spec.Shape.Select(size => size < 0 ? 2 : size).ToArray();
                if (shape.Aggregate(1.0, (a, b) => a * Math.Max(b, 1)) > 1 << 20)
                    throw new OdtpackException("input-shape", "too large for a test");
                return Tensors.Make(spec.ElementType, shape);
            }).ToArray();
            session.TrainStep(batch).Dispose();
            session.OptimizerStep();
            var proposed = session.ProposedSchedule(10, out var rate);
            if (proposed != null) session.SetSchedule(proposed, rate);
            using (var buffer = session.ToBuffer(true)) session.FromBuffer(buffer);
            try {
                package.SelfCheck();
            } catch (OdtpackException) { }
        }
    }
}
