using System;

namespace Odtpack {
    /// <summary>Bad input or usage, for the person who must correct it.</summary>
    public sealed class OdtpackException : Exception {
        /// <summary>Stable identifier, as in Python: "checkpoint-corrupt", for example.</summary>
        public string Code { get; }
        /// <summary>What happened, in a sentence.</summary>
        public string Problem { get; }
        /// <summary>Where, or empty.</summary>
        public string Place { get; }
        /// <summary>What to do, or empty.</summary>
        public string Hint { get; }

        public OdtpackException(string code, string problem, string place = "", string hint = "")
            : base(problem + (place.Length > 0 ? "\n  in: " + place : "")
                + (hint.Length > 0 ? "\n  help: " + hint : "") + "\n  code: " + code) {
            Code = code;
            Problem = problem;
            Place = place;
            Hint = hint;
        }
    }
}
