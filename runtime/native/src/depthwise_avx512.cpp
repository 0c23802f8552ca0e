#define ODTPACK_LOOPS kDepthwise_avx512
#define ODTPACK_WIDTH 16
#include "depthwise_execute.inc"
