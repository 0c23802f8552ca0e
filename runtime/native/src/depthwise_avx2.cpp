#define ODTPACK_LOOPS kDepthwise_avx2
#define ODTPACK_WIDTH 8
#include "depthwise_execute.inc"
