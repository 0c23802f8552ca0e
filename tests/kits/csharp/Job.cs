// What the programs of this folder share: tensors and settings from JSON files, states, digests.
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Runtime.InteropServices;
using System.Security.Cryptography;
using System.Text;
using Odtpack;

/// What does not hold.
sealed class Failure : Exception {
    internal Failure(string what) : base(what) { }

    internal static void Unless(bool good, string what) {
        if (!good) throw new Failure(what);
    }
}

/// Calls of odtpack.h that an app does not need.
static class Internals {
    const string Library = Native.Library;
    const CallingConvention C = CallingConvention.Cdecl;

    [DllImport(Library, CallingConvention = C)]
    internal static extern IntPtr odtpack_manifest_check(byte[] bytes, UIntPtr size);
    [DllImport(Library, CallingConvention = C)]
    internal static extern IntPtr odtpack_state_save_above(
        StateHandle state, byte[] path, [MarshalAs(UnmanagedType.I1)] bool optimizerState,
        [MarshalAs(UnmanagedType.I1)] bool keepPrevious, ulong externalAbove);
    [DllImport(Library, CallingConvention = C)]
    internal static extern IntPtr odtpack_state_optimizer(
        StateHandle state, out byte found, out long step, out float rate, out NativeText kind,
        out UIntPtr moments);
    [DllImport(Library, CallingConvention = C)]
    internal static extern IntPtr odtpack_state_moment(
        StateHandle state, UIntPtr index, out NativeText name, out UIntPtr number,
        out UIntPtr group, out IntPtr value, out IntPtr memory);

    internal static void Save(
        CheckpointState state, string path, bool keepPrevious, ulong externalAbove) =>
        Native.Call(odtpack_state_save_above(
            state.Handle, Native.Encode(path), true, keepPrevious, externalAbove));
}

static class Tensors {
    static readonly string[] Names = {
        "", "float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "", "bool", "float16",
        "float64", "uint32", "uint64"
    };
    internal static string Name(TensorElementType type) => Names[(int)type];

    internal static string InFolder(string folder, string path) => Path.Combine(folder, path);

    /// A tensor {"name", "dtype", "shape", "file", "offset"} whose bytes lie in a file of `folder`.
    internal static OrtValue Read(Json json, string folder) => Make(
        (TensorElementType)Array.IndexOf(Names, json["dtype"].Text()), json["shape"].Wholes(),
        File.ReadAllBytes(InFolder(folder, json["file"].Text())), (int)json["offset"].Whole());
    internal static OrtValue[] ReadBatch(Json list, string folder) =>
        list.List().ConvertAll(each => Read(each, folder)).ToArray();

    /// A tensor of bytes; of zeros without them.
    internal static OrtValue Make(
        TensorElementType type, long[] shape, byte[] bytes = null, int offset = 0) {
        switch (type) {
            case TensorElementType.Bool:
            case TensorElementType.UInt8: return Make<byte>(type, shape, bytes, offset);
            case TensorElementType.Int8: return Make<sbyte>(type, shape, bytes, offset);
            case TensorElementType.Int16: return Make<short>(type, shape, bytes, offset);
            case TensorElementType.Float16:
            case TensorElementType.UInt16: return Make<ushort>(type, shape, bytes, offset);
            case TensorElementType.Int32: return Make<int>(type, shape, bytes, offset);
            case TensorElementType.UInt32: return Make<uint>(type, shape, bytes, offset);
            case TensorElementType.Float: return Make<float>(type, shape, bytes, offset);
            case TensorElementType.Int64: return Make<long>(type, shape, bytes, offset);
            case TensorElementType.UInt64: return Make<ulong>(type, shape, bytes, offset);
        }
        return Make<double>(type, shape, bytes, offset);
    }
    static OrtValue Make<T>(TensorElementType type, long[] shape, byte[] bytes, int offset)
        where T : struct {
        var array = new T[shape.Aggregate(1L, (a, b) => a * b)];
        if (bytes != null) Buffer.BlockCopy(bytes, offset, array, 0, Buffer.ByteLength(array));
        return OrtValue.CreateTensorValueFromPart(array, 0, type, shape);
    }

    /// The bytes of a tensor.
    internal static byte[] Bytes(OrtValue value) {
        var array = Elements(value);
        var bytes = new byte[Buffer.ByteLength(array)];
        Buffer.BlockCopy(array, 0, bytes, 0, bytes.Length);
        return bytes;
    }
    static Array Elements(OrtValue value) {
        switch (value.ElementType) {
            case TensorElementType.Bool:
            case TensorElementType.UInt8: return value.ToArray<byte>();
            case TensorElementType.Int8: return value.ToArray<sbyte>();
            case TensorElementType.Int16: return value.ToArray<short>();
            case TensorElementType.Float16:
            case TensorElementType.UInt16: return value.ToArray<ushort>();
            case TensorElementType.Int32: return value.ToArray<int>();
            case TensorElementType.UInt32: return value.ToArray<uint>();
            case TensorElementType.Float: return value.ToArray<float>();
            case TensorElementType.Int64: return value.ToArray<long>();
            case TensorElementType.UInt64: return value.ToArray<ulong>();
        }
        return value.ToArray<double>();
    }
}

/// All that a state holds.
sealed class State : IDisposable {
    internal sealed class Parameter {
        internal string Name, Type;
        internal bool IsTrainable;
        internal OrtValue Value; // null without a value
        internal byte[] Bytes => Value == null ? new byte[0] : Tensors.Bytes(Value);
    }
    internal sealed class Moment {
        internal string Name;
        internal int Number, Group;
        internal OrtValue Value;
    }
    internal readonly List<Parameter> Parameters = new List<Parameter>();
    internal readonly List<Moment> Moments = new List<Moment>();
    internal readonly IReadOnlyDictionary<string, object> Properties;
    internal readonly bool HasOptimizer;
    internal readonly long Step;
    internal readonly float Rate;
    internal readonly string Kind;

    internal State(CheckpointState from) {
        var handle = from.Handle;
        for (var i = 0; i < from.ParameterNames.Count; ++i) {
            Native.Call(Native.odtpack_state_parameter_info(
                handle, (UIntPtr)i, out var name, out var trainable, out var type));
            var own = new Parameter {
                Name = name.Take(), Type = Tensors.Name(type), IsTrainable = trainable != 0
            };
            if (!from.IsNominal) own.Value = from.GetParameter(own.Name);
            Parameters.Add(own);
        }
        Properties = from.Properties;
        Native.Call(Internals.odtpack_state_optimizer(
            handle, out var found, out Step, out Rate, out var kind, out var count));
        HasOptimizer = found != 0;
        if (!HasOptimizer) return;
        Kind = kind.Take();
        for (var i = 0; i < (int)count; ++i) {
            Native.Call(Internals.odtpack_state_moment(
                handle, (UIntPtr)i, out var name, out var number, out var group, out var value,
                out var memory));
            Moments.Add(new Moment {
                Name = name.Take(), Number = (int)number, Group = (int)group,
                Value = new OrtValue(value, memory: memory)
            });
        }
    }
    public void Dispose() {
        foreach (var each in Parameters) each.Value?.Dispose();
        foreach (var each in Moments) each.Value.Dispose();
    }

    /// A digest of everything that a state holds (docs/formats/kits.md, hostile corpus).
    internal static string Digest(CheckpointState from) {
        using (var state = new State(from)) return Sha(string.Join("\n", state.Lines()));
    }
    IEnumerable<string> Lines() {
        var lines = Parameters.OrderBy(each => Hex(each.Name), StringComparer.Ordinal)
            .Select(each => {
                var dims = string.Join("x", each.Value?.Shape ?? new long[0]);
                return $"P {(each.IsTrainable ? "t" : "f")} {each.Type} "
                    + $"{(dims.Length == 0 ? "-" : dims)} {Sha(each.Bytes)} {Hex(each.Name)}";
            }).ToList();
        if (HasOptimizer) lines.Add($"O {Step} {Bits(Rate)}");
        lines.AddRange(
            Moments.OrderBy(each => each.Group)
            .ThenBy(each => $"{Hex(each.Name)} {each.Number}", StringComparer.Ordinal)
            .Select(each => $"M {each.Group} momentum{each.Number} "
                + $"{Sha(Tensors.Bytes(each.Value))} {Hex(each.Name)}"));
        lines.AddRange(
            Properties.OrderBy(each => Hex(each.Key), StringComparer.Ordinal).Select(each =>
                "V " + (each.Value is long whole ? $"i {whole}"
                    : each.Value is float real ? $"f {Bits(real)}"
                    : $"s {Hex((string)each.Value)}") + $" {Hex(each.Key)}"));
        return lines;
    }
    static string Hex(byte[] bytes) =>
        BitConverter.ToString(bytes).Replace("-", "").ToLowerInvariant();
    static string Hex(string text) => Hex(Encoding.UTF8.GetBytes(text));
    static string Bits(float value) =>
        BitConverter.ToUInt32(BitConverter.GetBytes(value), 0).ToString("x8");
    static string Sha(string text) => Sha(Encoding.UTF8.GetBytes(text));
    static string Sha(byte[] bytes) {
        using (var sha = SHA256.Create()) return Hex(sha.ComputeHash(bytes));
    }
}

/// The session of a job: {"package", "models", "checkpoint", "learning_rate", "schedule",
/// "step_model"}, the last of which may be false.
sealed class Training : IDisposable {
    internal readonly TrainingPackage Package;
    internal readonly CheckpointState State;
    internal readonly TrainingSession Session;
    internal readonly bool IsScheduled;

    /// With the job's checkpoint, or another one.
    internal Training(Json json, string folder, int threads, string checkpoint = null) {
        Package = TrainingPackage.Open(Tensors.InFolder(folder, json["package"].Text()));
        Func<string, string> model = key => json["models"][key].IsPresent
            ? Tensors.InFolder(folder, json["models"][key].Text()) : Package.Path(key);
        var own = json["checkpoint"].IsPresent
            ? Tensors.InFolder(folder, json["checkpoint"].Text()) : Package.Path("checkpoint");
        State = CheckpointState.LoadCheckpoint(checkpoint ?? own);
        using (var options = Package.SessionOptions(threads)) {
            if (json["device"].IsPresent) options.AddDevice(json["device"]["library"].Text());
            Session = new TrainingSession(
                options, Package, State, model("training_model"), model("eval_model"),
                model("optimizer_model"),
                json["step_model"].Flag(true) ? Package.StepModel() : null);
        }
        if (json["learning_rate"].IsPresent)
            Session.SetLearningRate((float)json["learning_rate"].Real());
        var (schedule, settings) = (json["schedule"], json["schedule"]["settings"]);
        IsScheduled = schedule.IsPresent || Session.RestoreSchedule();
        if (!schedule.IsPresent) return;
        Session.SetSchedule(
            new Schedule(
                schedule["kind"].Text(), settings["warmup_steps"].Whole(),
                settings["total_steps"].Whole(), settings["period"].Whole(),
                settings["floor"].Real(0), settings["gamma"].Real(0.1),
                settings["milestones"].Wholes()),
            schedule["initial_lr"].Real());
    }
    public void Dispose() {
        Session.Dispose();
        State.Dispose();
        Package.Dispose();
    }
}
