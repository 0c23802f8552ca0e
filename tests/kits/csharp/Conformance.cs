// Runs the cases of a folder of conformance vectors and prints one line for each: "passed NAME"
// or "FAILED NAME: why".
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using Odtpack;
using static Failure;

sealed class Comparison {
    internal bool IsExact;
    internal double Tolerance;

    internal void Loss(double found, double wanted, string what) {
        var isClose = Math.Abs(found - wanted) <= Tolerance * Math.Max(1, Math.Abs(wanted));
        Unless(IsExact ? found == wanted : isClose, $"{what} is {found:R}, not {wanted:R}");
    }
    internal void Same(OrtValue found, OrtValue wanted, string what) {
        Unless(
            found.ElementType == wanted.ElementType && found.Shape.SequenceEqual(wanted.Shape),
            $"{what} has another type or shape");
        if (Tensors.Bytes(found).SequenceEqual(Tensors.Bytes(wanted))) return;
        Unless(!IsExact && wanted.IsReal, $"{what} differs");
        double largest = 1, worst = 0;
        for (long i = 0; i < wanted.Count; ++i) {
            largest = Math.Max(largest, Math.Abs(wanted.GetReal(i)));
            worst = Math.Max(worst, Math.Abs(wanted.GetReal(i) - found.GetReal(i)));
        }
        Unless(worst <= Tolerance * largest, $"{what} differs by {worst}");
    }
    internal void Same(State found, State wanted) {
        Unless(
            found.Parameters.Select(each => (each.Name, each.IsTrainable)).SequenceEqual(
                wanted.Parameters.Select(each => (each.Name, each.IsTrainable))),
            "other parameters");
        for (var i = 0; i < found.Parameters.Count; ++i)
            Same(found.Parameters[i].Value, wanted.Parameters[i].Value, found.Parameters[i].Name);
        Unless(found.Properties.SequenceEqual(wanted.Properties), "the properties differ");
        Unless(
            found.HasOptimizer == wanted.HasOptimizer && found.Step == wanted.Step
            && found.Rate == wanted.Rate && found.Kind == wanted.Kind,
            "the optimizer stands elsewhere");
        Unless(
            found.Moments.Select(each => (each.Name, each.Number, each.Group)).SequenceEqual(
                wanted.Moments.Select(each => (each.Name, each.Number, each.Group))),
            "other moments");
        for (var i = 0; i < found.Moments.Count; ++i)
            Same(found.Moments[i].Value, wanted.Moments[i].Value, found.Moments[i].Name);
    }
}

sealed class Conformance {
    static bool isTolerant;
    readonly int threads;
    readonly string scratch;

    Conformance(int threads, string scratch) {
        this.threads = threads;
        this.scratch = scratch;
    }

    internal static int Run(string folder, IList<string> chosen) {
        var scratch = Path.Combine(Path.GetTempPath(), "odtpack-" + Guid.NewGuid());
        Directory.CreateDirectory(scratch);
        var index = Json.Read(folder + "/index.json");
        var suite = new Conformance((int)index["threads"].Whole(), scratch);
        var failed = 0;
        isTolerant = chosen.Remove("--tolerance");  // every comparison, for other processors
        foreach (var name in index["cases"].List().Select(each => each["name"].Text())) {
            if (chosen.Count > 0 && !chosen.Contains(name)) continue;
            try {
                suite.Check(folder + "/" + name);
                Console.WriteLine("passed " + name);
            } catch (Exception error) {
                failed = 1;
                Console.WriteLine($"FAILED {name}: {error}");
            }
        }
        Directory.Delete(scratch, true);
        return failed;
    }

    void Check(string folder) {
        var test = Json.Read(folder + "/case.json");
        switch (test["kind"].Text()) {
            case "train":
            case "resume":
            case "not_finite": Train(test, folder); return;
            case "nominal": Nominal(test, folder); return;
            case "error": Refused(test, folder); return;
            case "recover": Recover(test, folder); return;
            case "buffer":
                using (var training = new Training(test, folder, threads))
                using (var buffer = training.Session.ToBuffer(false))
                using (var wanted = Tensors.Read(test["values"], folder))
                    new Comparison { IsExact = true }.Same(buffer, wanted, "the buffer");
                return;
            case "self_check":
                using (var package = TrainingPackage.Open(folder + "/" + test["package"].Text()))
                    Code(package.SelfCheck, test["code"].Text("ok"));
                return;
        }
        throw new Failure("there is no kind " + test["kind"].Text());
    }
    static void Code(Action action, string wanted) {
        var (found, what) = ("ok", "");
        try {
            action();
        } catch (OdtpackException error) {
            (found, what) = (error.Code, error.Message);
        }
        Unless(found == wanted, $"it gives {found} and not {wanted}: {what}");
    }
    static Comparison ComparisonOf(Json test) => new Comparison {
        IsExact = !isTolerant && test["exact"].Flag(true), Tolerance = test["tolerance"].Real(2e-6)
    };

    static void Steps(Training training, Json test, string folder) {
        var (compare, session) = (ComparisonOf(test), training.Session);
        var number = 0;
        foreach (var step in test["steps"].List()) {
            var batch = Tensors.ReadBatch(step["inputs"], folder);
            var isWhole = session.HasStepModel;
            var isUpdate = step["update"].Flag(true);
            if (isUpdate && step["rate"].IsPresent)
                Unless(
                    session.GetLearningRate() == (float)step["rate"].Real(),
                    $"the learning rate is {session.GetLearningRate():R}");
            var (before, skipped) = (session.StepCount, session.SkippedSteps);
            using (var found = isWhole ? session.StepOn(batch) : session.TrainStep(batch)) {
                var code = step["not_finite"];
                Unless(
                    session.SkippedSteps - skipped == (code.IsPresent ? 1 : 0),
                    "the number of skipped steps");
                var loss = found[0].GetScalar();
                if (code.IsPresent) {
                    Unless(double.IsNaN(loss) || double.IsInfinity(loss), "the loss is finite");
                    Unless(session.LastNotFinite.Code == code.Text(), "why a step was skipped");
                } else {
                    compare.Loss(loss, step["loss"].Real(), $"loss {number + 1}");
                    Outputs(compare, found.Skip(1).ToList(), step["outputs"], folder);
                }
            }
            if (isUpdate) {
                if (!isWhole) session.OptimizerStep();
                if (training.IsScheduled && session.StepCount > before) session.SchedulerStep();
            }
            if (!isWhole && step["reset"].Flag(true)) session.LazyResetGrad();
            foreach (var value in batch) value.Dispose();
            ++number;
        }
    }
    static void Outputs(
        Comparison compare, IReadOnlyList<OrtValue> found, Json wanted, string folder) {
        if (!wanted.IsPresent) return;
        var list = wanted.List();
        Unless(found.Count == list.Count, "another number of outputs");
        for (var i = 0; i < list.Count; ++i)
            using (var value = Tensors.Read(list[i], folder))
                compare.Same(found[i], value, "output " + list[i]["name"].Text());
    }

    void Train(Json test, string folder) {
        using (var training = new Training(test, folder, threads)) {
            var (session, compare) = (training.Session, ComparisonOf(test));
            Unless(
                session.HasStepModel == test["step_model"].Flag(false),
                "the step model is used, or not, as it should");
            Steps(training, test, folder);
            Unless(
                session.SkippedSteps == test["skipped_steps"].Whole(),
                "the number of skipped steps");
            if (test["evaluation"].IsPresent) {
                var batch = Tensors.ReadBatch(test["evaluation"]["inputs"], folder);
                using (var found = session.EvalStep(batch))
                    compare.Loss(
                        found[0].GetScalar(), test["evaluation"]["loss"].Real(), "the evaluation");
                var accuracy = test["evaluation"]["accuracy"];
                var wanted = accuracy.IsPresent ? accuracy.Real() : (double?)null;
                Unless(
                    !compare.IsExact || session.Evaluate(new[] { batch }).Accuracy == wanted,
                    "the accuracy");
            }
            foreach (var each in test["properties"].Object()) {
                if (each.Value.IsText) {
                    training.State.AddProperty(each.Key, each.Value.Text());
                } else if (each.Value.Real() == Math.Floor(each.Value.Real())) {
                    training.State.AddProperty(each.Key, each.Value.Whole());
                } else {
                    training.State.AddProperty(each.Key, (float)each.Value.Real());
                }
            }
            var name = test["name"].Text();
            if (test["after"].IsPresent) {
                var path = $"{scratch}/{name}.ckpt";
                CheckpointState.SaveCheckpoint(training.State, path, true);
                Same(compare, path, folder + "/" + test["after"].Text());
            }
            if (test["export"].IsPresent) Export(session, test["export"], name, compare, folder);
        }
    }
    static void Same(Comparison compare, string found, string wanted) {
        using (var one = CheckpointState.LoadCheckpoint(found))
        using (var two = CheckpointState.LoadCheckpoint(wanted)) {
            Unless(one.Recovered == null && two.Recovered == null, "a file is damaged");
            compare.Same(new State(one), new State(two));
        }
    }
    void Export(
        TrainingSession session, Json exported, string name, Comparison compare, string folder) {
        var names = exported["outputs"].List().ConvertAll(each => each["name"].Text());
        var path = $"{scratch}/{name}.onnx";
        session.ExportModelForInferencing(path, names);
        var isEqual = File.ReadAllBytes(path).SequenceEqual(
            File.ReadAllBytes(folder + "/" + exported["file"].Text()));
        Unless(!compare.IsExact || isEqual, "the exported model has other bytes");
        using (var predictor = session.CreatePredictor(names)) {
            var inputs = predictor.InputNames.Select(input => Tensors.Read(
                exported["inputs"].List().First(each => each["name"].Text() == input), folder));
            using (var found = predictor.Run(inputs.ToArray())) // with other session options
                Outputs(new Comparison { Tolerance = 1e-5 }, found, exported["outputs"], folder);
        }
    }

    void Nominal(Json test, string folder) {
        using (var training = new Training(test, folder, threads)) {
            var batch = Tensors.ReadBatch(test["steps"].List()[0]["inputs"], folder);
            Code(() => training.Session.TrainStep(batch), "nominal-state");
            training.Session.FromBuffer(Tensors.Read(test["values"], folder), false);
            Steps(training, test, folder);
        }
    }

    void Recover(Json test, string folder) {
        string path = $"{scratch}/{test["checkpoint"].Text()}", before = path + ".previous";
        Unless(Path.GetFileName(before) == test["previous"].Text(), "the save before's name");
        foreach (var target in new[] { path, before }) {
            var source = folder + "/" + Path.GetFileName(target);
            File.Delete(target);
            if (File.Exists(source)) File.Copy(source, target);
        }
        using (var state = CheckpointState.LoadCheckpoint(path)) {
            var words = new List<string> { $"of optimizer step {test["step"].Whole()}:" };
            if (test["lost"].IsPresent)
                words.Add($"{test["lost"].Whole()} optimizer steps made since");
            Unless(words.All(each => state.Recovered.Contains(each)), state.Recovered);
            using (var wanted = CheckpointState.LoadCheckpoint(before))
                new Comparison { IsExact = true }.Same(new State(state), new State(wanted));
            // The first save stands in for the damaged file; only the next moves it on.
            var good = File.ReadAllBytes(before);
            CheckpointState.SaveCheckpoint(state, path, true, true);
            Unless(File.ReadAllBytes(before).SequenceEqual(good), "the save before is another one");
            var first = File.ReadAllBytes(path);
            state.AddProperty("again", 1L);
            CheckpointState.SaveCheckpoint(state, path, true, true);
            Unless(File.ReadAllBytes(before).SequenceEqual(first), "the save before was not kept");
        }
        using (var state = CheckpointState.LoadCheckpoint(path))
            Unless(state.Recovered == null, "it is damaged");
    }

    void Refused(Json test, string folder) => Code(() => {
        switch (test["action"].Text()) {
            case "open": TrainingPackage.Open(folder + "/" + test["package"].Text()); return;
            case "load_checkpoint":
                CheckpointState.LoadCheckpoint(folder + "/" + test["checkpoint"].Text());
                return;
        }
        using (var training = new Training(test, folder, threads)) {
            if (test["action"].Text() == "export")
                training.Session.ExportModelForInferencing(
                    scratch + "/refused.onnx",
                    test["outputs"].List().ConvertAll(each => each.Text()));
            if (test["action"].Text() == "step")
                training.Session.TrainStep(Tensors.ReadBatch(test["inputs"], folder)).Dispose();
        }
    }, test["code"].Text());
}
