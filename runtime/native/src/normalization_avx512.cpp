#define ODTPACK_LOOPS kNormalization_avx512
#define ODTPACK_WIDTH 16
#include "normalization_execute.inc"
