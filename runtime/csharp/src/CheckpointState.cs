using System;
using System.Collections.Generic;

namespace Odtpack {
    /// <summary>The state of a training: parameters, properties, and what the optimizer carries.
    /// Sessions that are made of it change it.</summary>
    public sealed unsafe class CheckpointState : IDisposable {
        internal readonly StateHandle Handle;
        readonly Dictionary<string, int> places = new Dictionary<string, int>();

        public IReadOnlyList<string> ParameterNames { get; }

        /// <summary>Load a checkpoint of odtpack or of ONNX Runtime training 1.17 to 1.19. If it is
        /// damaged or missing and the save before it was kept, that one is loaded;
        /// <see cref="Recovered"/> then says so.</summary>
        public static CheckpointState LoadCheckpoint(string path) {
            Ort.Load();
            Native.Call(Native.odtpack_state_load(Native.Encode(path), out var handle));
            return new CheckpointState(handle);
        }
        public static CheckpointState LoadCheckpointFromBuffer(byte[] bytes) {
            if (bytes == null) throw new ArgumentNullException(nameof(bytes));
            Ort.Load();
            Native.Call(Native.odtpack_state_load_buffer(
                bytes, (UIntPtr)bytes.LongLength, out var handle));
            return new CheckpointState(handle);
        }
        /// <summary>Save to one file, whole or not at all. With the optimizer's state, training
        /// goes on from it bit by bit; accumulated gradients are not in it: save after
        /// OptimizerStep. The file that is replaced is kept as <c>path.previous</c> if that is
        /// asked for.</summary>
        public static void SaveCheckpoint(
            CheckpointState state, string path, bool includeOptimizerState = false,
            bool keepPrevious = false) => Native.Call(Native.odtpack_state_save(
                state.Handle, Native.Encode(path), includeOptimizerState, keepPrevious));

        CheckpointState(StateHandle handle) {
            Handle = handle;
            var names = new string[(int)Native.odtpack_state_parameter_count(handle)];
            for (var i = 0; i < names.Length; ++i) {
                Native.Call(Native.odtpack_state_parameter_info(
                    handle, (UIntPtr)i, out var name, out _, out _));
                names[i] = name.Take();
                places[names[i]] = i;
            }
            ParameterNames = names;
        }
        public void Dispose() => Handle.Dispose();

        /// <summary>What is wrong with the file that was to be loaded, and what was lost, if the
        /// save before it was loaded instead; otherwise null.</summary>
        public string Recovered {
            get {
                Native.Call(Native.odtpack_state_recovered(Handle, out var text));
                return text.Take();
            }
        }
        /// <summary>True if the file carried a digest of all that it holds, which was right. Those
        /// of ONNX Runtime's own training carry none, and load unchecked.</summary>
        public bool IsChecked => Native.odtpack_state_is_checked(Handle);
        /// <summary>True as long as the parameters have names and no values.</summary>
        public bool IsNominal => Native.odtpack_state_is_nominal(Handle);

        public void AddProperty(string name, long value) =>
            Set(name, new NativeProperty { Kind = 0, Whole = value });
        public void AddProperty(string name, float value) =>
            Set(name, new NativeProperty { Kind = 1, Real = value });
        public void AddProperty(string name, string value) {
            var bytes = Native.Encode(value);
            fixed (byte* start = bytes) {
                var text = new NativeText {
                    Bytes = (IntPtr)start, Size = (UIntPtr)(bytes.Length - 1)
                };
                Set(name, new NativeProperty { Kind = 2, Text = text });
            }
        }
        public void RemoveProperty(string name) =>
            Native.Call(Native.odtpack_state_set_property(Handle, Native.Encode(name), null));
        /// <summary>A long, a float or a string.</summary>
        public object GetProperty(string name) {
            Native.Call(
                Native.odtpack_state_get_property(Handle, Native.Encode(name), out var property));
            return Value(property);
        }
        /// <summary>All of them, by name, as <see cref="GetProperty"/> returns each.</summary>
        public IReadOnlyDictionary<string, object> Properties {
            get {
                var all = new Dictionary<string, object>();
                var count = (int)Native.odtpack_state_property_count(Handle);
                for (var i = 0; i < count; ++i) {
                    Native.Call(Native.odtpack_state_property_at(
                        Handle, (UIntPtr)i, out var name, out var property));
                    all[name.Take()] = Value(property);
                }
                return all;
            }
        }

        /// <summary>The parameter itself, not a copy: it shows the training's progress, and what is
        /// copied into it counts in the next step. Dispose of it.</summary>
        public OrtValue GetParameter(string name) {
            if (!places.TryGetValue(name, out var place))
                throw new OdtpackException(
                    "unknown-parameter", $"The state has no parameter '{name}'.");
            Native.Call(Native.odtpack_state_parameter(
                Handle, (UIntPtr)place, out var value, out var memory));
            return new OrtValue(value, memory: memory);
        }

        /// <summary>Set all parameters to those of a complete checkpoint of the same model.
        /// Properties and the optimizer's state remain as they are.</summary>
        public void LoadParameters(string path) =>
            Native.Call(Native.odtpack_state_load_parameters(Handle, Native.Encode(path)));
        /// <summary>Bring trained parameters into the state of a newer package's checkpoint, before
        /// a session is made of it; everything else comes from the newer one. By default those that
        /// were trained; an empty list carries none.</summary>
        public void CarryOver(
            CheckpointState trained, IReadOnlyCollection<string> names = null,
            bool optimizerState = true) {
            using (var list = new Names(names ?? new string[0])) {
                Native.Call(Native.odtpack_state_carry_over(
                    Handle, trained.Handle, names == null ? null : list.Pointers, list.Count,
                    optimizerState));
            }
        }

        /// <summary>Write the adapter that was trained: to a file whose name ends in
        /// <c>.onnx_adapter</c>, which ONNX Runtime's own adapters read, or to a folder, made if
        /// needed, with PEFT's two files.</summary>
        public void SaveAdapter(TrainingPackage package, string path) =>
            Native.Call(Native.odtpack_adapter_save(package.Handle, Handle, Native.Encode(path)));
        /// <summary>Set the trained parameters to those of such a file or folder, all of them or
        /// none.</summary>
        public void LoadAdapter(TrainingPackage package, string path) =>
            Native.Call(Native.odtpack_adapter_load(package.Handle, Handle, Native.Encode(path)));

        void Set(string name, NativeProperty property) =>
            Native.Call(Native.odtpack_state_set_property(Handle, Native.Encode(name), &property));
        static object Value(NativeProperty property) =>
            property.Kind == 0 ? property.Whole
            : property.Kind == 1 ? (object)property.Real : property.Text.Take();
    }
}
