#define ODTPACK_LOOPS kLoops_baseline
#include "elementwise_execute.inc"
