#define ODTPACK_LOOPS kLoops_avx512
#include "elementwise_execute.inc"
