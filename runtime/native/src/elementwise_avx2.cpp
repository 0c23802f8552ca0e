#define ODTPACK_LOOPS kLoops_avx2
#include "elementwise_execute.inc"
