#define ODTPACK_LOOPS kNormalization_baseline
#define ODTPACK_WIDTH 4
#include "normalization_execute.inc"
