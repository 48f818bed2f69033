"""Alert rules as a pure state machine, and the receivers that hear of them."""
