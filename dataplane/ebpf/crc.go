package ebpf

// The CRC of SCTP is one of Castagnoli's polynomial, in which the highest bit is x^0 (crc32c in the kernel). Each byte
// more of data makes of a CRC a multiplication by x^8, which bpf/packet.h looks up digit by digit.

const castagnoli = 0x82f63b78

// crcShifts are what a digit at some place of a CRC becomes when 2^i bytes follow.
func crcShifts() (out [16][8][16]uint32) {
	power := uint32(1) << 23 // x^8
	for i := range out {
		for j := range out[i] {
			for digit := range out[i][j] {
				out[i][j][digit] = crcProduct(uint32(digit)<<(4*j), power)
			}
		}
		power = crcProduct(power, power)
	}
	return out
}

// crcProduct multiplies two polynomials.
func crcProduct(a, b uint32) (product uint32) {
	for ; b != 0; b <<= 1 {
		product ^= a & -(b >> 31)
		a = a>>1 ^ castagnoli&-(a&1)
	}
	return product
}
