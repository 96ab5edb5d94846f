"""Operations whose every row has the same bits in every batch, for both engines. It imports torch alone."""
