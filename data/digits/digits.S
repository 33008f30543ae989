// digits.bin inside the program: training and demos need no file beside the binary.
    .section .rodata
    .balign 64
    .global lockstep_digits
lockstep_digits:
    .incbin LOCKSTEP_DIGITS_FILE
    .global lockstep_digits_end
lockstep_digits_end:
    .byte 0
    .section .note.GNU-stack, "", %progbits
