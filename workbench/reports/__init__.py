"""What is said: pure functions of what ranks replied and recorded, and the reports that people read."""
