using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;

namespace Odtpack {
    /// <summary>A schedule of the learning rate, after a linear warm-up.</summary>
    public sealed unsafe class Schedule {
        /// <summary>constant, linear, cosine, step or multistep.</summary>
        public string Kind { get; }
        public long WarmupSteps { get; }
        public long TotalSteps { get; }
        public long Period { get; }
        public double Floor { get; }
        public double Gamma { get; }
        public IReadOnlyList<long> Milestones { get; }

        public Schedule(
            string kind, long warmupSteps = 0, long totalSteps = 0, long period = 0,
            double floor = 0, double gamma = 0.1, long[] milestones = null) {
            Kind = kind;
            WarmupSteps = warmupSteps;
            TotalSteps = totalSteps;
            Period = period;
            Floor = floor;
            Gamma = gamma;
            Milestones = (long[])milestones?.Clone() ?? new long[0];
            Ort.Load();
            Use((ref NativeSchedule schedule) => {
                Native.Call(Native.odtpack_schedule_check(ref schedule));
                return 0;
            });
        }
        internal Schedule(NativeSchedule schedule) {
            Kind = Native.Decode(schedule.Kind);
            WarmupSteps = schedule.WarmupSteps;
            TotalSteps = schedule.TotalSteps;
            Period = schedule.Period;
            Floor = schedule.Floor;
            Gamma = schedule.Gamma;
            var milestones = new long[(int)schedule.MilestoneCount];
            Marshal.Copy(schedule.Milestones, milestones, 0, milestones.Length);
            Milestones = milestones;
        }

        /// <summary>The fraction of the initial rate that holds after so many steps.</summary>
        public double Factor(long step) =>
            Use((ref NativeSchedule schedule) =>
                Native.odtpack_schedule_factor(ref schedule, step));

        internal delegate double Body(ref NativeSchedule schedule);
        internal double Use(Body body) {
            var milestones = (long[])Milestones;
            fixed (byte* kind = Native.Encode(Kind))
            fixed (long* first = milestones) {
                var schedule = new NativeSchedule {
                    Kind = (IntPtr)kind, WarmupSteps = WarmupSteps, TotalSteps = TotalSteps,
                    Period = Period, Floor = Floor, Gamma = Gamma, Milestones = (IntPtr)first,
                    MilestoneCount = (UIntPtr)milestones.Length
                };
                return body(ref schedule);
            }
        }
    }
}
