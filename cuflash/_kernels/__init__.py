"""What is each kernel? Its configuration, its parameters."""
