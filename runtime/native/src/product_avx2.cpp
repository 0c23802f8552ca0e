#define ODTPACK_LOOPS kProduct_avx2
#define ODTPACK_WIDTH 8
#include "product_execute.inc"
