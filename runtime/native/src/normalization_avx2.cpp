#define ODTPACK_LOOPS kNormalization_avx2
#define ODTPACK_WIDTH 8
#include "normalization_execute.inc"
